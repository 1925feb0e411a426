"""Truncated BPTT: the gradients are those of a model that detaches its states every k steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.planning.truncation import Cuts
from reroll.report.tables import facts

FEATURES, NEURONS = 3, 5


class Loop(nn.Module):
    """A network over time that may detach its states before steps k, 2 k, ..."""

    def __init__(self, every: int = 0) -> None:
        super().__init__()
        self.every = every
        self.read, self.back = nn.Linear(FEATURES, NEURONS), nn.Linear(NEURONS, NEURONS)
        self.cell, self.second = nn.LSTMCell(FEATURES, NEURONS), nn.GRUCell(NEURONS, NEURONS)
        self.leak, self.out = nn.Parameter(torch.tensor(0.9)), nn.Linear(NEURONS, 2)

    def cut(self, t: int, *states: Tensor) -> tuple[Tensor, ...]:
        """The states, detached where the gradients of eager are to be cut."""
        return tuple(each.detach() for each in states) if self.every and t and t % self.every == 0 else states


class Elman(Loop):
    """One statement makes the state, of which only the last is read."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
        for t in range(x_TBI.shape[0]):
            (h_BN,) = self.cut(t, h_BN)
            h_BN = torch.tanh(self.read(x_TBI[t]) + self.back(h_BN))
        return h_BN


class Lstm(Loop):
    """The last step differs from the others, as nobody reads its second state."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = c_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
        found = []
        for t in range(x_TBI.shape[0]):
            h_BN, c_BN = self.cut(t, h_BN, c_BN)
            h_BN, c_BN = self.cell(x_TBI[t], (h_BN, c_BN))
            found.append(self.out(h_BN))
        return torch.stack(found)


class Spiking(Loop):
    """A count of spikes is added up: it is no state, and its gradient reaches every step."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        potential = spike = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
        count = x_TBI.new_zeros(x_TBI.shape[1], 2)
        for t in range(x_TBI.shape[0]):
            potential, spike = self.cut(t, potential, spike)
            potential = self.leak * potential + self.read(x_TBI[t]) + self.back(spike) - spike
            spike = torch.sigmoid(5 * (potential - 0.3))
            count = count + self.out(spike)
        return count


class Late(Loop):
    """The state begins as None, so the first step differs; the leak comes before all else, but not in the first."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN, found = None, []
        for t in range(x_TBI.shape[0]):
            if h_BN is not None:
                (h_BN,) = self.cut(t, h_BN)
            kept = self.leak * self.back(h_BN) if h_BN is not None else 0.0
            h_BN = torch.tanh(kept + self.read(x_TBI[t]))
            found.append(h_BN)
        return torch.stack(found)


class Sunk(Loop):
    """The entry of the sequence is read first, and used last: the normal form has its read behind the product."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN, taken_TBN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS), self.read(x_TBI)
        for t in range(x_TBI.shape[0]):
            (h_BN,) = self.cut(t, h_BN)
            taken_BN = taken_TBN[t]
            h_BN = torch.tanh(h_BN @ self.back.weight + taken_BN)
        return h_BN


class Deep(Loop):
    """Two loops, one after the other, which become one; a value of two steps ago is read in the first."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = ago_BN = g_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
        first, found = [], []
        for t in range(x_TBI.shape[0]):
            h_BN, ago_BN = self.cut(t, h_BN, ago_BN)
            new = torch.tanh(self.read(x_TBI[t]) + self.back(h_BN) + 0.5 * ago_BN)
            ago_BN = h_BN
            h_BN = new
            first.append(h_BN)
        for t in range(x_TBI.shape[0]):
            (g_BN,) = self.cut(t, g_BN)
            g_BN = self.second(first[t], g_BN)
            found.append(g_BN)
        return torch.stack(found)


class OneLine(Loop):
    """Where an iteration begins cannot be told: its one line leaves something out in the first."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
        for t in range(x_TBI.shape[0]):
            h_BN = (self.leak * h_BN if t else h_BN) + self.read(x_TBI[t])
        return h_BN


def gradients(model: Callable[..., Any], owner: Loop, x_TBI: Tensor) -> list[Tensor]:
    """Of a loss that weights every entry in another way; zeros where there is none."""
    leaves = [x_TBI.clone().requires_grad_(), *owner.parameters()]
    result = model(leaves[0])
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    found = torch.autograd.grad((result * weights).sin().sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def pair(kind: type[Loop], every: int) -> tuple[Loop, Loop]:
    """The model, and one with the same numbers that detaches its states."""
    torch.manual_seed(0)
    model, cut = kind().double(), kind(every).double()
    cut.load_state_dict(model.state_dict())
    return model, cut


@pytest.mark.variants(4)
@pytest.mark.parametrize("kind", [Elman, Lstm, Spiking, Late, Sunk, Deep])
@pytest.mark.parametrize("every", [1, 6, 13])
def test_gradients_are_those_of_states_detached_every_k_steps(kind: type[Loop], every: int) -> None:
    model, cut = pair(kind, every)
    compiled = reroll.compile(model, lowering="eager", truncate=every)
    differ = False
    for steps in (40, 27):
        x_TBI = torch.randn(steps, 2, FEATURES, dtype=torch.float64)
        expected = gradients(cut, cut, x_TBI)
        torch.testing.assert_close(gradients(compiled, model, x_TBI), expected, rtol=1e-9, atol=1e-12)
        whole = gradients(model, model, x_TBI)
        differ |= any((one - other).abs().max() > 1e-6 for one, other in zip(whole, expected, strict=True))
    assert differ, "a detach that changes nothing would show nothing"


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "store_all"},
        {"schedule": "double"},
        {"schedule": "revolve", "slots": 3, "segment": 4},
        {"schedule": "hierarchical", "chunk": 12, "slots": 2, "remote": "disk"},
        {"memory_budget": 0.8},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_schedule_cuts_at_the_same_steps(options: dict[str, Any]) -> None:
    model, cut = pair(Late, 7)
    compiled = reroll.compile(model, lowering="eager", truncate=7, **options)
    x_TBI = torch.randn(45, 2, FEATURES, dtype=torch.float64)
    torch.testing.assert_close(gradients(compiled, model, x_TBI), gradients(cut, cut, x_TBI), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Spiking, Deep])
def test_the_backend_cuts_too(kind: type[Loop]) -> None:
    model, cut = pair(kind, 5)
    x_TBI = torch.randn(23, 2, FEATURES, dtype=torch.float64)
    compiled = torch.compile(model, backend="reroll", options={"truncate": 5, "lowering": "eager"})
    found, expected = gradients(compiled, model, x_TBI), gradients(cut, cut, x_TBI)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [Spiking, pytest.param(Deep, marks=pytest.mark.campaign)])
def test_compiled_segments_are_cut_too(kind: type[Loop]) -> None:
    model, cut = pair(kind, 5)
    x_TBI = torch.randn(23, 2, FEATURES, dtype=torch.float64)
    expected = gradients(cut, cut, x_TBI)
    lowered = reroll.compile(model, truncate=5)
    torch.testing.assert_close(gradients(lowered, model, x_TBI), expected, rtol=1e-9, atol=1e-12)


def test_a_layer_of_torchs_is_cut_in_each_of_its_layers() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(FEATURES, NEURONS, 2).double()
    x_TBI = torch.randn(30, 2, FEATURES, dtype=torch.float64)
    state, found = None, []
    for part in x_TBI.split(8):
        y_TBN, state = layer(part, state)
        state = state.detach()
        found.append(y_TBN)
    torch.cat(found).square().sum().backward()
    expected = [each.grad for each in layer.parameters()]
    layer.zero_grad()
    compiled = reroll.compile(layer, lowering="eager", truncate=8)
    compiled(x_TBI)[0].square().sum().backward()
    torch.testing.assert_close([each.grad for each in layer.parameters()], expected, rtol=1e-9, atol=1e-12)


def test_a_loss_in_the_loop_is_no_state() -> None:
    model, cut = pair(Lstm, 6)
    x_TBI, y_TBO = torch.randn(40, 2, FEATURES).double(), torch.randn(40, 2, 2).double()
    nn.functional.mse_loss(cut(x_TBI), y_TBO).backward()
    train = reroll.compile(model, loss=nn.functional.mse_loss, lowering="eager", truncate=6)
    train(x_TBI, target=y_TBO).backward()
    for name, parameter in model.named_parameters():
        expected = cut.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_what_is_held_is_a_tape_of_k_steps_and_a_carry_for_each_k() -> None:
    compiled = reroll.compile(Elman(), truncate=10, lowering="eager")
    loop = reroll.explain(compiled, torch.randn(200, 2, FEATURES)).loops[0]
    assert loop.choice.schedule == "standard"
    assert loop.choice.problem.chunk == 10
    assert loop.choice.segment == 5
    assert dict(facts(loop))["truncated"].startswith("no gradient of a state passes back beyond 10 steps (cut in 20")


def test_an_iteration_whose_beginning_is_unclear_is_refused() -> None:
    compiled = reroll.compile(OneLine(), truncate=10, lowering="eager")
    with pytest.raises(reroll.UnsupportedError, match="begin cannot be told from its lines"):
        compiled(torch.randn(40, 2, FEATURES))


@pytest.mark.parametrize("alike", [False, True])
def test_a_loop_in_two_pieces_is_refused(alike: bool) -> None:
    """An iteration in the middle differs from the others, or those from there on do."""

    class Broken(Loop):
        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
            for t in range(x_TBI.shape[0]):
                if t == 20 if alike else t >= 20:
                    h_BN = torch.relu(h_BN)
                if not alike or t != 20:
                    new = self.read(x_TBI[t])
                    h_BN = torch.tanh(new + self.back(h_BN))
            return h_BN

    compiled = torch.compile(Broken(), backend="reroll", options={"truncate": 7, "lowering": "eager"})
    with pytest.raises(reroll.UnsupportedError, match="begin cannot be told from its lines"):
        compiled(torch.randn(40, 2, FEATURES))


@pytest.mark.parametrize("start", [0, 1])
def test_iterations_that_may_be_missing_are_refused(start: int) -> None:
    """A reset leaves nothing of the iterations before it but shapes; a loop that starts late looks the same."""

    class Reset(Loop):
        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
            for t in range(start, x_TBI.shape[0]):
                if t == 10 and not start:
                    h_BN = torch.zeros_like(h_BN)
                new = self.read(x_TBI[t])
                h_BN = torch.tanh(new + self.back(h_BN))
            return h_BN

    compiled = torch.compile(Reset(), backend="reroll", options={"truncate": 7, "lowering": "eager"})
    with pytest.raises(reroll.UnsupportedError, match="begin cannot be told from its lines"):
        compiled(torch.randn(40, 2, FEATURES))


def test_a_reset_leaves_two_loops_that_nothing_joins() -> None:
    class Reset(nn.Module):
        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BI = x_TBI[0]
            for t in range(x_TBI.shape[0]):
                if t == 10:
                    h_BI = torch.zeros_like(h_BI)
                h_BI = torch.tanh(x_TBI[t] + 0.5 * h_BI)
            return h_BI

    compiled = torch.compile(Reset(), backend="reroll", options={"lowering": "eager"})
    reroll.check(compiled, torch.randn(40, 2, FEATURES, requires_grad=True), strict=True, measure=False)


@pytest.mark.parametrize("first", [False, True])
def test_a_last_step_that_reads_states_in_its_own_way_is_refused(first: bool) -> None:
    class Special(Loop):
        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            h_BN = other_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
            for t in range(x_TBI.shape[0]):
                if t == x_TBI.shape[0] - 1:
                    other_BN = torch.relu(h_BN)
                    h_BN = h_BN * 0.5 if first else h_BN
                new = self.read(x_TBI[t])
                h_BN = torch.tanh(new + self.back(h_BN))
            return h_BN, other_BN

    compiled = reroll.compile(Special(), truncate=13, lowering="eager")
    compiled(torch.randn(41, 2, FEATURES))
    with pytest.raises(reroll.UnsupportedError, match="reads the last states in a way"):
        compiled(torch.randn(40, 2, FEATURES))


def test_several_iterations_in_one_step_are_refused() -> None:
    class Turns(Loop):
        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BN = x_TBI.new_zeros(x_TBI.shape[1], NEURONS)
            for t in range(x_TBI.shape[0]):
                new = self.read(x_TBI[t]) + self.back(h_BN)
                h_BN = torch.tanh(new) if t % 2 else torch.relu(new)
            return h_BN

    compiled = torch.compile(Turns(), backend="reroll", options={"truncate": 10, "lowering": "eager"})
    with pytest.raises(reroll.UnsupportedError, match="read one entry of the sequence in each iteration"):
        compiled(torch.randn(40, 2, FEATURES))


def test_what_cannot_be_truncated_is_refused() -> None:
    with pytest.raises(reroll.OptionError, match="truncate=0 must be a whole number"):
        reroll.compile(Elman(), truncate=0)
    compiled = torch.compile(nn.Linear(3, 3), backend="reroll", options={"truncate": 4})
    with pytest.raises(reroll.NoRecurrenceError, match="truncate=4 cannot be kept"):
        compiled(torch.randn(2, 3))
    compiled = reroll.compile(Lstm(), truncate=1, lowering="eager")
    compiled(torch.randn(20, 2, FEATURES))
    for steps in (2, 1):
        with pytest.raises(reroll.NoRecurrenceError, match=r"truncate=1 cannot be kept.*one or two steps"):
            compiled(torch.randn(steps, 2, FEATURES))
    with pytest.raises(reroll.UnsupportedError, match="compares with plain autograd"):
        reroll.check(compiled, torch.randn(20, 2, FEATURES))


def test_blocks_over_depth_are_no_loop_over_time() -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    compiled = torch.compile(deep, backend="reroll", options={"truncate": 4, "lowering": "eager"})
    with pytest.raises(reroll.NoRecurrenceError, match="truncate=4 cannot be kept"):
        compiled(torch.randn(512, 64))


def test_ranges_end_where_any_carry_is_cut() -> None:
    cuts = Cuts(4, (1, None, 0), 12)
    assert [cuts.at(step) for step in range(5)] == [frozenset(), frozenset(), frozenset(), {0}, {2}]
    assert [*cuts.ranges(0, 9)] == [(0, 3), (3, 4), (4, 7), (7, 8), (8, 9)]
    assert [*cuts.ranges(3, 4)] == [(3, 4)]
    for start, stop in ((0, 12), (2, 11), (5, 6), (-1, 13)):
        assert cuts.between(start, stop) == [step for step in range(start + 1, stop) if cuts.at(step)]
