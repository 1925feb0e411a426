"""Packed sequences: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` on sequences of several lengths, by ``reroll.compile``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import reroll
from recorded_networks import agree, read_by_dynamo, twins
from reroll.errors import RerollWarning

EAGER: dict[str, Any] = {"lowering": "eager"}
pytestmark = pytest.mark.filterwarnings("ignore:The longest sequence")
D = torch.float64
BATCH, WIDTH, HIDDEN = 5, 4, 6


class Ragged(nn.Module):
    """A layer between packing and padding."""

    def __init__(self, kind: str, batch_first: bool = False, is_sorted: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed, self.batch_first, self.is_sorted = nn.Linear(WIDTH, WIDTH, dtype=D), batch_first, is_sorted
        self.layer: Any = getattr(nn, kind)(WIDTH, HIDDEN, batch_first=batch_first, dtype=D, **options)

    def run(self, packed: PackedSequence) -> Any:
        """The layer's result."""
        return self.layer(packed)

    def forward(self, x: Tensor, lengths_B: Any) -> Any:
        embedded = torch.tanh(self.embed(x))
        packed = pack_padded_sequence(embedded, lengths_B, batch_first=self.batch_first, enforce_sorted=self.is_sorted)
        y, last = self.run(packed)
        out, lengths = pad_packed_sequence(y, batch_first=self.batch_first, padding_value=0.5)
        return out, last, lengths


class Given(Ragged):
    """First states that are learned."""

    def __init__(self) -> None:
        super().__init__("LSTM")
        self.h = nn.Parameter(torch.randn(1, 1, HIDDEN, dtype=D))

    def run(self, packed: PackedSequence) -> Any:
        h_1BH = self.h.expand(-1, BATCH, -1).contiguous()
        return self.layer(packed, (h_1BH, torch.tanh(h_1BH)))


class TwoLayers(Ragged):
    """A second layer reads what the first gives."""

    def __init__(self) -> None:
        super().__init__("GRU")
        self.second = nn.RNN(HIDDEN, 3, dtype=D)

    def run(self, packed: PackedSequence) -> Any:
        return self.second(self.layer(packed)[0])


def data(steps: int, batch_first: bool = False) -> tuple[Tensor, Tensor]:
    """A batch, and lengths of which one is that of the batch."""
    lengths_B = torch.randint(1, steps + 1, (BATCH,))
    lengths_B[2] = steps
    x_TBI = torch.randn(steps, BATCH, WIDTH, dtype=D)
    return (x_TBI.transpose(0, 1).contiguous() if batch_first else x_TBI).requires_grad_(), lengths_B


MODELS: dict[str, tuple[Any, list[int]]] = {
    "LSTM": (lambda: Ragged("LSTM"), [20]),
    "GRU, two layers, both directions": (lambda: Ragged("GRU", num_layers=2, bidirectional=True), [20, 20, 20]),
    "LSTM, projected, batch first": (lambda: Ragged("LSTM", batch_first=True, proj_size=3), [20]),
    "RNN, no biases, batch first": (lambda: Ragged("RNN", batch_first=True, bias=False, nonlinearity="relu"), [20]),
    "first states": (Given, [20]),
    "two modules": (TwoLayers, [20]),
    "LSTM, three layers, dropout": (lambda: Ragged("LSTM", num_layers=3, dropout=0.4), [20, 20, 20]),
    "all is dropped": (lambda: Ragged("GRU", num_layers=2, dropout=1.0), [20, 20]),
    "GRU, both directions, dropout": (
        lambda: Ragged("GRU", batch_first=True, num_layers=2, bidirectional=True, dropout=0.2),
        [20, 20, 20, 20],
    ),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_rolled(name: str) -> None:
    torch.manual_seed(0)
    make, loops = MODELS[name]
    model = make()
    run = reroll.compile(model, **EAGER)
    for steps in (20, 33, 20):
        reroll.check(run, *data(steps, model.batch_first), strict=True, measure=False)
    assert [loop.recurrence.steps for loop in reroll.explain(run, *data(20, model.batch_first)).loops] == loops


@pytest.mark.parametrize(
    "options", [{"schedule": "double", "segment": 3}, {"memory_budget": "45KiB"}, {"verify": True}]
)
def test_any_schedule_keeps_ended_states(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Ragged("LSTM"), **EAGER, **options)
    reroll.check(run, *data(24), strict=True, measure=False)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.campaign), {"num_layers": 2, "dropout": 0.3}],
    ids=["one layer", "dropout"],
)
def test_packed_sequences_by_inductor(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Ragged("GRU", **more))
    for steps in (24, 31):
        reroll.check(run, *data(steps), strict=True, measure=False)


def test_lengths_may_be_a_list() -> None:
    torch.manual_seed(0)
    run = reroll.compile(Ragged("GRU", is_sorted=True), **EAGER)
    x = data(20)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The longest sequence")
        reroll.check(run, x, [20, 20, 7, 7, 1], strict=True, measure=False)
        run(x, [20, 20, 7, 7, 1])
    with pytest.warns(RerollWarning, match=r"5 numbers.*torch\.tensor\(lengths\)"):
        reroll.check(run, x, [20, 3, 2, 1, 1], strict=True, measure=False)


@pytest.mark.parametrize(
    ("first", "more"), [([20, 9, 8, 3, 1], {}), (None, {}), ([20, 9, 8, 3, 1], {"num_layers": 2, "dropout": 0.5})]
)
def test_lengths_that_torch_refuses_are_its_errors_and_those_that_end_early_are_right(
    first: list[int] | None, more: dict[str, Any]
) -> None:
    net, twin, run = twins(Ragged("GRU", is_sorted=True, **more))
    x = data(20)[0]
    if first is not None:
        agree(net, twin, run, x, torch.tensor(first))
    for wrong in ([9, 20, 8, 3, 1], [20, 9, 8, 3, 0]):
        texts = set[str]()
        for each in (run, net):
            with pytest.raises(RuntimeError) as raised:
                each(x, torch.tensor(wrong))
            texts.add(str(raised.value))
        assert len(texts) == 1
    agree(net, twin, run, x, torch.tensor([20, 12, 8, 3, 1]), recorded=first is None)
    for early in ([19, 9, 8, 3, 1], [20, 9, 8, 3, 1], [7, 7, 2, 1, 1]):
        agree(net, twin, run, x, torch.tensor(early), recorded=False)


class Read(Ragged):
    """What a packed sequence holds is read by more than the layer."""

    def __init__(self, way: str) -> None:
        super().__init__("LSTM")
        self.way = way

    def run(self, packed: PackedSequence) -> Any:
        if self.way == "data":
            packed = packed._replace(data=torch.relu(packed.data))
        if self.way == "sizes":
            assert int(packed.batch_sizes[1]) > 0
        return self.layer(packed)


_EMPTY = pytest.mark.xfail(
    raises=ValueError,
    reason="torch 2.13 makes an empty tuple of a PackedSequence that _replace gave, where allow_rnn is set",
)


@pytest.mark.parametrize("way", [pytest.param("data", marks=_EMPTY), "sizes"])
def test_other_uses_of_packed_sequences_are_read_by_dynamo(way: str) -> None:
    read_by_dynamo(Read(way), data(20), data(33), data(20))


def test_a_sequence_that_is_padded_to_more_is_read_by_dynamo() -> None:
    class Longer(Ragged):
        def forward(self, x: Tensor, lengths_B: Any) -> Any:
            y, _ = self.layer(pack_padded_sequence(x, lengths_B, enforce_sorted=False))
            return pad_packed_sequence(y, total_length=x.shape[0] + 3)[0]

    read_by_dynamo(Longer("GRU"), data(20), data(33), data(20))
