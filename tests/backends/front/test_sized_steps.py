"""Steps that read values as large as the sequence is long: attention over all states, by ``reroll.compile``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from agreement import differences, results
from length_networks import I
from reroll.errors import RerollWarning

EAGER: dict[str, Any] = {"lowering": "eager"}
H = 6
pytestmark = pytest.mark.filterwarnings("ignore:Every step of the loop")


class Attention(nn.Module):
    """An encoder, and a decoder that reads all of its states in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRUCell(I, H), nn.GRUCell(H, H)
        self.key, self.query = nn.Linear(H, H), nn.Linear(H, H)

    def encoded(self, x_TBI: Tensor) -> Tensor:
        """All states of the encoder."""
        h_BH, states = x_TBI.new_zeros(x_TBI.shape[1], H), []
        for x_BI in x_TBI:
            h_BH = self.encoder(x_BI, h_BH)
            states.append(h_BH)
        return torch.stack(states)

    def read(self, h_BH: Tensor, states_TBH: Tensor) -> Tensor:
        """What is read of the states: dot products with keys."""
        scores_TB = (self.key(states_TBH) * self.query(h_BH)).sum(-1)
        return (torch.softmax(scores_TB, 0)[..., None] * states_TBH).sum(0)

    def forward(self, x_TBI: Tensor) -> Any:
        states_TBH = self.encoded(x_TBI)
        h_BH, rows = states_TBH[-1], []
        for _ in range(x_TBI.shape[0]):
            h_BH = self.decoder(self.read(h_BH, states_TBH), h_BH)
            rows.append(h_BH)
        return torch.stack(rows)


class BatchFirst(Attention):
    """Keys lie with the batch first, turned in memory, and are divided by a number of the length."""

    def read(self, h_BH: Tensor, states_TBH: Tensor) -> Tensor:
        states_BTH = states_TBH.transpose(0, 1)
        scores_BT = torch.bmm(self.key(states_BTH), self.query(h_BH)[..., None])[..., 0] / math.sqrt(
            states_BTH.shape[1]
        )
        return torch.bmm(torch.softmax(scores_BT, 1)[:, None], states_BTH)[:, 0]


class Sizes(Attention):
    """Sizes of the length among the operands of operations in the step."""

    def read(self, h_BH: Tensor, states_TBH: Tensor) -> Tensor:
        steps = states_TBH.shape[0]
        scores_TB = (self.key(states_TBH) * h_BH.expand(steps, -1, -1)).view(steps, -1, H).sum(-1)
        late_T1 = (torch.arange(steps) >= steps // 2)[:, None]
        scores_TB = scores_TB.masked_fill(late_T1, -1.0) + torch.zeros(steps, 1)
        return (F.dropout(torch.sigmoid(scores_TB), 0.25)[..., None] * states_TBH).mean(0)


class Locations(Attention):
    """Attention that carries its last weights, as large as the sequence, and gives them (arXiv 1506.07503)."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x_TBI: Tensor) -> Any:
        states_TBH = self.encoded(x_TBI)
        keys_TBH, h_BH = self.key(states_TBH), states_TBH.mean(0)
        weights_TB = torch.full(x_TBI.shape[:2], 1.0 / x_TBI.shape[0], dtype=x_TBI.dtype)
        rows, found = [], []
        for _ in range(x_TBI.shape[0]):
            places_TB = self.places(weights_TB.t()[:, None])[:, 0].t()
            weights_TB = torch.softmax((keys_TBH * self.query(h_BH)).sum(-1) + places_TB, 0)
            h_BH = self.decoder((weights_TB[..., None] * states_TBH).sum(0), h_BH)
            rows.append(h_BH)
            found.append(weights_TB)
        return torch.stack(rows), torch.stack(found), weights_TB


class Decoded(Attention):
    """As many steps of the decoder at every length."""

    def forward(self, x_TBI: Tensor) -> Any:
        states_TBH = self.encoded(x_TBI)
        h_BH, rows = states_TBH[-1], []
        for _ in range(12):
            h_BH = self.decoder(self.read(h_BH, states_TBH), h_BH)
            rows.append(h_BH)
        return rows


class Heads(Attention):
    """torch's attention layer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H, 2)

    def read(self, h_BH: Tensor, states_TBH: Tensor) -> Tensor:
        read_BH: Tensor = self.attention(h_BH[None], states_TBH, states_TBH, need_weights=False)[0][0]
        return read_BH


class Masked(Attention):
    """Lengths of the sequences, of which a mask is made outside of the loop."""

    def forward(self, x_TBI: Tensor, lengths_B: Any = None) -> Any:
        states_TBH = self.encoded(x_TBI)
        pad_TB = torch.arange(x_TBI.shape[0])[:, None] >= lengths_B
        h_BH, rows = states_TBH[-1], []
        for _ in range(x_TBI.shape[0]):
            scores_TB = (self.key(states_TBH) * self.query(h_BH)).sum(-1).masked_fill(pad_TB, float("-inf"))
            h_BH = self.decoder((torch.softmax(scores_TB, 0)[..., None] * states_TBH).sum(0), h_BH)
            rows.append(h_BH)
        return torch.stack(rows)


MODELS: dict[str, tuple[type[Attention], list[int]]] = {
    "dot products": (Attention, [23, 23]),
    "batch first": (BatchFirst, [23, 23]),
    "sizes": (Sizes, [23, 23]),
    "weights that are carried": (Locations, [23, 23]),
    "as many steps at any length": (Decoded, [23, 12]),
    "torch's layer": (Heads, [23, 23]),
    "a mask": (Masked, [23, 23]),
}


def data(name: str, steps: int) -> tuple[Tensor, ...]:
    """Sequences, and lengths if a model takes such."""
    x_TBI = torch.randn(steps, 3, I, dtype=torch.float64, requires_grad=True)
    return (x_TBI, torch.tensor([steps, 5, steps // 2])) if name == "a mask" else (x_TBI,)


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", MODELS)
def test_attention_over_all_states_is_rolled(name: str) -> None:
    torch.manual_seed(0)
    kind, loops = MODELS[name]
    run = reroll.compile(kind().double(), **EAGER)
    for steps in (23, 9):
        reroll.check(run, *data(name, steps), strict=True, measure=False)
    assert [loop.recurrence.steps for loop in reroll.explain(run, *data(name, 23)).loops] == loops


@pytest.mark.parametrize(
    "options", [{"schedule": "double", "segment": 3}, {"memory_budget": "120KiB"}, {"verify": True}]
)
def test_plans_know_the_size_of_each_length(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Locations().double(), **EAGER, **options)
    for steps in (23, 31):
        reroll.check(run, *data("", steps), strict=True, measure=False)
    shapes = [[each.shape for each in loop.carries] for loop in reroll.explain(run, *data("", 31)).loops]
    assert shapes[1] == [(31, 3), (3, H)] or shapes[1] == [(3, H), (31, 3)]


@pytest.mark.inductor
@pytest.mark.campaign
def test_compiled_segments_have_the_size_of_each_length() -> None:
    torch.manual_seed(0)
    run = reroll.compile(BatchFirst())
    for steps in (23, 31):
        reroll.check(run, torch.randn(steps, 3, I), strict=True, measure=False)


def test_it_is_said_once_that_every_length_compiles() -> None:
    run = reroll.compile(Attention().double(), **EAGER)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for steps in (23, 31):
            run(*data("", steps))
        assert not said
        for steps in (33, 23, 35, 24):
            run(*data("", steps))
    assert [each.category for each in said] == [RerollWarning]
    assert "as large as the sequence is long" in str(said[0].message)


def test_nothing_is_said_of_batches_and_lengths_that_change_together() -> None:
    run = reroll.compile(nn.GRU(I, H), **EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        for steps in (23, 31, 33, 27):
            run(torch.randn(steps, 3, I))
        for batch, steps in ((4, 23), (2, 40)):
            run(torch.randn(steps, batch, I))


def test_what_grows_from_step_to_step_is_right_and_told() -> None:
    class Growing(Attention):
        def forward(self, x_TBI: Tensor) -> Any:
            h_BH, states = x_TBI.new_zeros(x_TBI.shape[1], H), [x_TBI.new_zeros(x_TBI.shape[1], H)]
            for x_BI in x_TBI:
                h_BH = self.encoder(x_BI, h_BH) + self.read(h_BH, torch.stack(states))
                states.append(h_BH)
            return h_BH

    net: Any = Growing().double()
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    with pytest.warns(RerollWarning, match="no recurrence"):
        run(*data("", 23))
    for steps in (23, 9, 23):
        x_TBI = data("", steps)[0].detach()
        assert not differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-11)


class WholeAndRow(nn.Module):
    """Each step reads all of the sequence, and its own row of it."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(6, 6)

    def forward(self, x_TBI: Tensor) -> Tensor:
        state_BI = x_TBI.new_zeros(x_TBI.shape[1], 6)
        for t in range(x_TBI.shape[0]):
            state_BI = torch.tanh(self.back((x_TBI + state_BI).sum(0) * 0.05) + x_TBI[t])
        return state_BI


class RowAndColumn(nn.Module):
    """Each step reads a row of a sequence, and a column, which is as long as all of it; or its mean, too."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.taken, self.back, self.mean = nn.Linear(16, 6), nn.Linear(6, 6), mean

    def forward(self, x_TBI: Tensor) -> Tensor:
        y_TK = x_TBI.flatten(1)[:, :16]
        state_BI = x_TBI.new_zeros(x_TBI.shape[1], 6)
        for t in range(x_TBI.shape[0]):
            column_BI = (y_TK[:, t].tanh()[:, None, None] * x_TBI).sum(0)
            state_BI = torch.tanh(self.back(state_BI) + self.taken(y_TK[t]) + 0.1 * column_BI)
            state_BI = state_BI + y_TK.sum(0).mean() if self.mean else state_BI
        return state_BI


READERS = {"all": WholeAndRow, "column": RowAndColumn, "both": partial(RowAndColumn, mean=True)}


@pytest.mark.variants(4)
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_sequence_of_which_steps_read_a_row_and_more(reader: Callable[[], nn.Module], lowering: Any) -> None:
    model = reader().double()
    fast = reroll.compile(model, lowering=lowering, schedule="standard", segment=2)
    for steps in (13, 8):
        found = reroll.check(fast, torch.randn(steps, 3, 6, dtype=torch.float64), measure=False)
        assert found.equal, str(found)
