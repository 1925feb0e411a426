"""A sequence made before the loop, of which a step reads several rows, or one row in several places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import reroll

D = torch.float64


def loss_inside(x: Tensor, w: Tensor) -> Any:
    y, h, total = x * 2, torch.zeros(3, 4, dtype=D), torch.zeros((), dtype=D)
    for t in range(x.shape[0]):
        h = torch.tanh(y[t] @ w + h)
        total = total + (h - y[t]).square().mean()
    return h, total


def loss_from_a_number(x: Tensor, w: Tensor) -> Any:
    y, h, total = x * 2, torch.zeros(3, 4, dtype=D), cast(Tensor, 0)
    for t in range(x.shape[0]):
        h = torch.tanh(y[t] @ w + h)
        total = total + (h - y[t]).square().mean()
    return h, total


def row_before(x: Tensor, w: Tensor) -> Tensor:
    y, h = x * 2, torch.zeros(3, 4, dtype=D)
    for t in range(x.shape[0]):
        h = torch.tanh(y[t] @ w + h + (y[t - 1] if t else y[t] * 0))
    return h


def rows_around(x: Tensor, w: Tensor) -> Tensor:
    y, h, last = torch.sin(x), torch.zeros(3, 4, dtype=D), x.shape[0] - 1
    for t in range(x.shape[0]):
        h = torch.tanh(y[t] @ w + h + (y[t - 1] if t else 0)) * (y[t + 1] if t < last else y[0]) + y[last]
    return h


@pytest.mark.parametrize("loop", [loss_inside, loss_from_a_number, row_before, rows_around])
def test_rows_that_are_read_more_than_once(loop: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 3, 4, dtype=D, requires_grad=True), torch.randn(4, 4, dtype=D, requires_grad=True)
    for model in (
        torch.compile(loop, backend="reroll", options={"lowering": "eager", "on_no_recurrence": "error"}),
        reroll.compile(loop, lowering="eager"),
    ):
        reroll.check(model, x, w, strict=True, measure=False)
