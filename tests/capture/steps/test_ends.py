"""First and last turns that differ in nothing that matters are turns of the loop, and gradients stay autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from pairs import Spike

STEPS = 12


class Cell(nn.Module):
    """Weights for the loops below."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.enter, self.again = nn.Linear(4, 6), nn.Linear(6, 6)
        self.start = nn.Parameter(torch.randn(2, 6))

    def forward(self, x_TBI: Tensor) -> Tensor:
        """What the body gives."""
        return self.body(self, x_TBI)


def fills_among_operations(cell: Cell, x: Tensor) -> Tensor:
    """States are made where the first step needs them, like what was made before."""
    h: Tensor | None = None
    v: Tensor | None = None
    for t in range(len(x)):
        entering = cell.enter(x[t])
        v = torch.full_like(entering, 0.5) if v is None else v
        v = 0.9 * v + entering
        h = v.new_zeros(v.shape) if h is None else h
        h = torch.tanh(cell.again(h) + v)
    assert h is not None
    return h


def reads_among_operations(cell: Cell, x: Tensor) -> Tensor:
    """States are rows of one tensor, read where the first step needs them, with a gradient."""
    h: Tensor | None = None
    v: Tensor | None = None
    for t in range(len(x)):
        v = 0.9 * (cell.start[0].expand(2, 6) if v is None else v) + cell.enter(x[t])
        h = torch.tanh(cell.again(cell.start[1].expand(2, 6) if h is None else h) + v)
    assert h is not None
    return h


def state_that_is_a_parameter(cell: Cell, x: Tensor) -> Tensor:
    """The first state is an input of the graph, with a gradient."""
    h: Tensor = cell.start
    for t in range(len(x)):
        h = torch.tanh(cell.again(h) + cell.enter(x[t]))
    return h


def sum_from_a_number(cell: Cell, x: Tensor) -> Tensor:
    """A sum begins as 0; the state is read, too."""
    total: Any = 0
    h = x.new_zeros(x.shape[1], 6)
    for t in range(len(x)):
        h = torch.tanh(cell.again(h) + cell.enter(x[t]))
        total = total + h
    mean: Tensor = total / len(x)
    return mean


def sum_in_place_from_a_number(cell: Cell, x: Tensor) -> Tensor:
    """As SpikingJelly's tutorials have it."""
    total: Any = 0.0
    h = x.new_zeros(x.shape[1], 6)
    for t in range(len(x)):
        h = torch.tanh(cell.again(h) + cell.enter(x[t]))
        total += h
    mean: Tensor = total / len(x)
    return mean


def dead_at_the_last_step(cell: Cell, x: Tensor) -> Tensor:
    """Nobody reads what the last step leaves in v, in two operations."""
    v, total = x.new_zeros(x.shape[1], 6), x.new_zeros(x.shape[1], 6)
    for t in range(len(x)):
        u = 0.9 * v + cell.enter(x[t])
        z = Spike.apply(u)  # type: ignore[no-untyped-call]
        total = total + cell.again(z)
        v = (u - z) * 0.5
    return total


def function_of_a_state_without_gradient(cell: Cell, x: Tensor) -> Tensor:
    """As snnTorch has it: what resets the first state is a function whose operand needs no gradient yet."""
    v: Tensor | None = None
    total = x.new_zeros(x.shape[1], 6)
    for t in range(len(x)):
        entering = cell.enter(x[t])
        v = torch.zeros_like(entering) if v is None else v
        reset = Spike.apply(v - 0.5).detach()  # type: ignore[no-untyped-call]
        v = 0.9 * v + entering - reset * 0.5
        total = total + cell.again(Spike.apply(v - 0.5))  # type: ignore[no-untyped-call]
    return total


BODIES = {
    body.__name__: body
    for body in (
        fills_among_operations,
        reads_among_operations,
        state_that_is_a_parameter,
        sum_from_a_number,
        sum_in_place_from_a_number,
        dead_at_the_last_step,
        function_of_a_state_without_gradient,
    )
}


def check(cell: Cell, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """That gradients are those of eager."""
    found, expected = gradients(cell, run, x), gradients(cell, cell, x)
    assert len(found) == len(expected) > 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def gradients(cell: Cell, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    cell.zero_grad(set_to_none=True)
    run(x).square().sum().backward()
    return [each.grad for each in cell.parameters() if each.grad is not None]


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", ["reroll.compile", "backend"])
@pytest.mark.parametrize("name", BODIES)
def test_all_steps_are_the_loops(name: str, door: str) -> None:
    cell, x = Cell(BODIES[name]).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64)
    options: dict[str, Any] = {"lowering": "eager"}
    backend = torch.compile(cell, backend="reroll", options=options)
    run = reroll.compile(cell, **options) if door == "reroll.compile" else backend
    check(cell, run, x)
    (loop,) = reroll.explain(run, x).loops
    assert loop.recurrence.steps == STEPS


def last_spikes(cell: Cell, x: Tensor) -> tuple[Tensor, Tensor]:
    """The last spikes, which no step reads, beside the last state."""
    v = x.new_zeros(x.shape[1], 6)
    for t in range(len(x)):
        z = Spike.apply(v - 0.5)  # type: ignore[no-untyped-call]
        v = 0.9 * v + cell.enter(x[t]) + cell.again(z)
    return v, z


@pytest.mark.parametrize("schedule", ["standard", "double"])
def test_last_spikes_are_carried_along(schedule: str) -> None:
    cell, x = Cell(last_spikes).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64)  # type: ignore[arg-type]

    def summed(run: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda given: torch.cat(run(given))

    run = reroll.compile(cell, lowering="eager", schedule=schedule, segment=2)
    found, expected = gradients(cell, summed(run), x), gradients(cell, summed(cell), x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    (loop,) = reroll.explain(run, x).loops
    assert (loop.recurrence.steps, len(loop.recurrence.carries)) == (STEPS, 2)


def two_loops_of_one_cell(cell: Cell, x: Tensor) -> Tensor:
    """The second loop's first turn is like the last one of the first loop, with nothing but its state between them."""
    h = x.new_zeros(x.shape[1], 6)
    for t in range(len(x)):
        h = torch.tanh(cell.again(h) + cell.enter(x[t]))
    back = x.new_zeros(x.shape[1], 6)
    for t in reversed(range(len(x))):
        back = torch.tanh(cell.again(back) + cell.enter(x[t]))
    return h + back


def test_ends_are_not_taken_from_another_loop() -> None:
    cell, x = Cell(two_loops_of_one_cell).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64)
    run = torch.compile(cell, backend="reroll", options={"lowering": "eager"})
    check(cell, run, x)
    assert [loop.recurrence.steps for loop in reroll.explain(run, x).loops] == [STEPS, STEPS]


def test_a_number_that_is_not_zero_stays_one() -> None:
    def from_one(cell: Cell, x: Tensor) -> Tensor:
        total: Any = 1
        h = x.new_zeros(x.shape[1], 6)
        for t in range(len(x)):
            h = torch.tanh(cell.again(h) + cell.enter(x[t]))
            total = total + h
        assert isinstance(total, Tensor)
        return total

    cell, x = Cell(from_one).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64)
    check(cell, reroll.compile(cell, lowering="eager"), x)


def test_a_state_that_is_made_without_gradients_stays_there() -> None:
    """What is made in ``no_grad`` is not moved out of it."""

    def without(cell: Cell, x: Tensor) -> Tensor:
        h: Tensor | None = None
        for t in range(len(x)):
            entering = cell.enter(x[t])
            if h is None:
                with torch.no_grad():
                    h = cell.start * 2
            h = torch.tanh(cell.again(h) + entering)
        assert h is not None
        return h

    cell, x = Cell(without).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64)
    check(cell, reroll.compile(cell, lowering="eager"), x)
    assert cell.start.grad is None


def test_a_state_is_not_moved_into_a_block_without_gradients() -> None:
    def behind(cell: Cell, x: Tensor) -> Tensor:
        h: Tensor | None = None
        v: Tensor | None = None
        for t in range(len(x)):
            with torch.no_grad():
                scale = torch.exp(cell.start) if h is None else h.abs() + 0.1
            v = 0.9 * (cell.start[0].expand(2, 6) if v is None else v) + cell.enter(x[t]) * scale
            h = torch.tanh(cell.again(cell.start[1].expand(2, 6) if h is None else h) + v)
        assert h is not None
        return h

    cell, x = Cell(behind).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64)
    check(cell, torch.compile(cell, backend="reroll", options={"lowering": "eager"}), x)
    assert cell.start.grad is not None
