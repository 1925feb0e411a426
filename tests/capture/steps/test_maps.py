"""Loops that carry nothing: an operation on each row, which end where rows are read otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reroll

pytestmark = pytest.mark.usefixtures("double_precision")


class Adds(torch.autograd.Function):
    """Twice its operand; an auxiliary loss adds to each gradient that comes in."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + 0.5


def twice(value: Tensor) -> Tensor:
    made: Tensor = Adds.apply(value)  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_some_rows_of_a_map_gives_the_others_no_gradient(used: int) -> None:
    def model(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The same function of all states, and of one more value that is read apart."""
        state, states, other = h.new_zeros(h.shape), [], (h * w).relu()
        for row in x.unbind():
            state = torch.tanh(row * w + state)
            states.append(state)
        rows = [twice(each) for each in states]
        last = twice(other)
        return torch.stack(rows).tanh(), last.exp()

    x, w, h = torch.randn(9, 2, 3), torch.randn(3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    compiled = reroll.compile(model, lowering="eager", proof="never")
    grads = [torch.autograd.grad(run(x, w, h)[used].sum(), [w, h], allow_unused=True) for run in (compiled, model)]
    assert [each is None for each in grads[0]] == [each is None for each in grads[1]]
    torch.testing.assert_close(*[[each for each in both if each is not None] for both in grads])


def test_rows_that_are_read_alike_are_one_map() -> None:
    def model(x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        state = x.new_zeros(x.shape[1:])
        for row in carried.unbind():
            state = torch.tanh(row + state)
        return torch.stack([twice(row) for row in x.unbind()]), state

    x, carried = torch.randn(9, 2, 3, requires_grad=True), torch.randn(9, 2, 3)
    compiled: Any = reroll.compile(model, lowering="eager")
    reroll.check(compiled, x, carried, strict=True, measure=False)
    assert sorted(loop.recurrence.steps for loop in reroll.explain(compiled, x, carried).loops) == [9, 9]


@pytest.mark.parametrize("used", [0, 1])
def test_rows_of_two_origins_are_two_maps(used: int) -> None:
    def model(x: Tensor, w: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The same sum of rows that no loop makes, and of states."""
        state, states, others = x.new_zeros(x.shape[1:]), [], [(row @ v).relu() for row in x.unbind()]
        for row in x.unbind():
            state = torch.tanh(row * w + state)
            states.append(state)
        return [each.sum() for each in others], [each.sum() for each in states]

    x, w, v = torch.randn(9, 2, 3), torch.randn(3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    compiled = reroll.compile(model, lowering="eager", proof="never")
    for each in (0, 4, -1):
        found = [
            torch.autograd.grad(run(x, w, v)[used][each].sum(), [w, v], allow_unused=True) for run in (compiled, model)
        ]
        assert [grad is None for grad in found[0]] == [grad is None for grad in found[1]]
        torch.testing.assert_close(*[[grad for grad in both if grad is not None] for both in found])
