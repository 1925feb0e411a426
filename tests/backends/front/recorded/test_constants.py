"""What a record of operations may show Python: answers about constants, and sizes; and leaves that a model makes.

The patterns are those of Norse (first states that need a gradient, sizes and values that are tensors) and of
torchdiffeq (assertions on a grid of times).
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import reroll
from recorded_networks import read_by_dynamo

EAGER: dict[str, Any] = {"lowering": "eager", "schedule": "standard", "segment": 2, "chunk": 3}
pytestmark = pytest.mark.filterwarnings("ignore:The model asks")
D = torch.float64


def data(steps: int = 20) -> Tensor:
    """Sequences of 3 rows of 4 numbers."""
    return torch.randn(steps, 3, 4, dtype=D, requires_grad=True)


class State(NamedTuple):
    """A potential and a current."""

    v: Tensor
    i: Tensor


class FirstStates(nn.Module):
    """Without a state a step begins with one of its own, which needs a gradient; its sizes are a tensor's."""

    def __init__(self, leak: Any = 0.1) -> None:
        super().__init__()
        self.fc, self.leak = nn.Linear(4, 5, dtype=D), torch.as_tensor(leak, dtype=D)
        self.hidden: Any = torch.tensor(5)

    def initial(self, x: Tensor) -> State:
        """A state from which to begin."""
        sizes: Any = (x.shape[0], self.hidden)
        value: Any = self.leak.detach()
        v = torch.full(sizes, value, dtype=D)
        state = State(v, torch.zeros(x.shape[0], self.hidden, dtype=D))
        state.v.requires_grad = True
        return state

    def forward(self, x: Tensor) -> tuple[Tensor, State]:
        state, rows = None, []
        for t in range(x.shape[0]):
            state = self.initial(x[t]) if state is None else state
            i = 0.8 * state.i + self.fc(x[t]) * (0.5 if x[t].is_sparse else 1.0)
            v = torch.tanh(0.9 * state.v + i)
            state = State(v, i)
            rows.append(v)
        assert state is not None
        return torch.stack(rows), state


def test_first_states_that_need_a_gradient_are_rolled() -> None:
    torch.manual_seed(0)
    run = reroll.compile(FirstStates(), **EAGER)
    for steps in (20, 31):
        reroll.check(run, data(steps), strict=True, measure=False)
    assert len(reroll.explain(run, data()).loops) == 1


def test_a_budget_takes_first_states_of_tensors_too() -> None:
    torch.manual_seed(0)
    run = reroll.compile(FirstStates(), lowering="eager", memory_budget="1MiB")
    reroll.check(run, data(), strict=True, measure=False)


def test_a_value_that_fills_is_read_at_every_call() -> None:
    torch.manual_seed(0)
    net = FirstStates()
    run = reroll.compile(net, **EAGER)
    for leak in (0.1, -0.4):
        net.leak.fill_(leak)
        reroll.check(run, data(), strict=True, measure=False)


class Padded(nn.Module):
    """A state of as many zeros as a buffer says, of which the mean is read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=D)
        self.extra: Any = torch.tensor(2)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        h = torch.ones(x.shape[1], 4, dtype=D)
        more = torch.ones(self.extra, dtype=D).sum()
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + h * more)
        return h


def test_a_size_that_changes_is_recorded_anew() -> None:
    torch.manual_seed(0)
    net = Padded()
    run = reroll.compile(net, **EAGER)
    for size in (2, 7, 2):
        net.extra.fill_(size)
        reroll.check(run, data(), strict=True, measure=False)


class Growing(Padded):
    """The size is one more at every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.extra.add_(1)
        return super().forward(x)


def test_a_size_that_the_model_has_changed_is_read_by_dynamo() -> None:
    run = read_by_dynamo(Growing(), data(), data(31), data())
    assert int(run.extra) == 2 + 3


class Shared(nn.Module):
    """A first state that is the memory of a parameter, and needs a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.start = nn.Linear(4, 4, dtype=D), nn.Parameter(torch.randn(3, 4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.detach()
        h.requires_grad = True
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + h)
        return h


def test_the_parameter_behind_a_leaf_gets_no_gradient() -> None:
    torch.manual_seed(0)
    reroll.check(reroll.compile(Shared(), **EAGER), data(), strict=True, measure=False)


class Outcome(nn.Module):
    """The leaf is the result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.zeros(3, 4, dtype=D)
        h.requires_grad_(True)
        first = h
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h * 0.5)
        return first, h


def test_a_leaf_that_is_given_needs_a_gradient_as_in_eager() -> None:
    run = reroll.compile(Outcome(), **EAGER)
    x = data().detach()
    (leaf, last), (plain_leaf, plain_last) = run(x), Outcome()(x)
    assert leaf.requires_grad is plain_leaf.requires_grad is True
    (found,), (expected,) = (torch.autograd.grad(b.sum(), a) for a, b in ((leaf, last), (plain_leaf, plain_last)))
    torch.testing.assert_close(found, expected)


class Grid(nn.Module):
    """A fixed grid of times, which is checked, and whose steps are values of tensors."""

    def __init__(self, steps: int = 20, end: float = 1.0) -> None:
        super().__init__()
        self.fc, self.num_steps, self.end = nn.Linear(4, 4, dtype=D), steps, end

    def forward(self, y: Tensor) -> Tensor:
        times = torch.linspace(0.0, self.end, self.num_steps, dtype=D)
        gaps = times[1:] > times[:-1]
        assert gaps.all(), "times rise"
        found = [y]
        for before, after in pairwise(times):
            y = y + (after - before) * torch.tanh(self.fc(y))
            found.append(y)
        return torch.stack(found)


def test_assertions_on_constants_are_recorded() -> None:
    torch.manual_seed(0)
    net = Grid()
    run = reroll.compile(net, **EAGER)
    y = torch.randn(3, 4, dtype=D, requires_grad=True)
    for steps in (20, 33):
        net.num_steps = steps
        reroll.check(run, y, strict=True, measure=False)
    assert len(reroll.explain(run, y).loops) == 1


def test_an_assertion_that_fails_is_raised_as_in_eager() -> None:
    net = Grid(end=-1.0)
    with pytest.raises(AssertionError, match="times rise"):
        reroll.compile(net, **EAGER)(torch.randn(3, 4, dtype=D))


class Late(nn.Module):
    """From 25 steps on, constants say that the result is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.5 if (torch.arange(x.shape[0]) > 24).any() else 1.0
        h = torch.zeros(3, 4, dtype=D)
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + h * scale)
        return h


def test_an_answer_that_changes_with_the_length_is_never_taken_for_another() -> None:
    torch.manual_seed(0)
    net = Late()
    run = reroll.compile(net, **EAGER)
    reroll.check(run, data(20), strict=True, measure=False)
    for steps in (25, 40, 24):
        reroll.check(run, data(steps), strict=True, measure=False)


class Numbers(nn.Module):
    """Python is shown numbers that are made of constants and of the length: how many steps, and a row of a table."""

    def __init__(self, of_values: bool = False) -> None:
        super().__init__()
        self.fc, self.of_values = nn.Linear(4, 4, dtype=D), of_values

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        times = torch.linspace(0.0, x.shape[0] - 1.0, x.shape[0], dtype=D)
        grid = torch.arange(0, torch.ceil(times[-1] + 1).item(), dtype=D)
        grid[-1] = times[-1]
        table, h = self.fc(x).sum(1), torch.zeros(3, 4, dtype=D)
        for t in grid:
            row = torch.bucketize(t, times)
            row = row + (table[row] > 1e9).sum() if self.of_values else row
            h = torch.tanh(x[row] * h + table[row] / float(times[-1]))
        return h


def test_numbers_made_of_constants_are_read() -> None:
    torch.manual_seed(0)
    run = reroll.compile(Numbers(), **EAGER)
    for steps in (20, 33):
        reroll.check(run, data(steps), strict=True, measure=False)
    assert len(reroll.explain(run, data()).loops) == 1


def test_a_row_that_the_model_computes_is_read_by_dynamo() -> None:
    read_by_dynamo(Numbers(of_values=True), data(), data(31), data())


class Loop(nn.Module):
    """A constant asked at every step."""

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(x.shape[0])
        h, total = torch.zeros(3, 4, dtype=D), torch.zeros(3, 4, dtype=D)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h)
            if times[t] % 2 == 0:
                total = total + h
        return total


def test_a_constant_asked_at_every_step() -> None:
    run = reroll.compile(Loop(), **EAGER)
    for steps in (20, 21, 34):
        reroll.check(run, data(steps), strict=True, measure=False)


def test_a_recorded_model_with_first_states_is_copied() -> None:
    run = reroll.compile(FirstStates(), **EAGER)
    run(data())
    reroll.check(copy.deepcopy(run), data(), strict=True, measure=False)


def test_devices_and_types_that_no_tensor_decides() -> None:
    def model(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        device, dtype = torch.device("cpu"), torch.promote_types(torch.float32, D)
        h = torch.zeros(3, 4, device=device, dtype=dtype)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + 0.5 * h)
        return h

    compiled, x = reroll.compile(model, **EAGER), data()
    expected = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)
