"""What is taken of all steps may be all of a short sequence: results and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

End = Callable[[Tensor], Tensor]
ENDS: dict[str, End] = {
    "the sum of the first 20": lambda y: y[:20].sum(0),
    "the mean of the last 20": lambda y: y[-20:].mean(),
    "the first 20": lambda y: y[:20],
    "every 9th, backwards": lambda y: y[::9].flip(0)[0],
    "every 10th": lambda y: y[::10].softmax(0)[0],
    "the sum of every 4th": lambda y: y[1::4].sum(0),
    "all but 20": lambda y: y[:-20].sum(0),
    "the last of every 4th": lambda y: y[1::4][-1],
    "one of every 5th": lambda y: y[::5][-2],
    "the last sum of every 7th": lambda y: y[::7].cumsum(0)[-1],
    "places": lambda y: y[torch.arange(0, len(y), 5)][-1],
    "windows": lambda y: y.unfold(0, 4, 4)[-1].sum(-1),
    "pools": lambda y: F.avg_pool1d(y.permute(1, 2, 0), 5)[..., -1],
}


class States(nn.Module):
    """Something of all states of a loop."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.cell, self.end = nn.GRUCell(2, 4), end

    def forward(self, x: Tensor) -> Tensor:
        h, states = x.new_zeros(x.shape[1], 4), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h)
        return self.end(torch.stack(states))


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", ENDS)
def test_what_is_taken_of_all_steps_is_right(name: str) -> None:
    torch.manual_seed(0)
    model = States(ENDS[name])
    fast: Any = reroll.compile(model, lowering="eager")
    for steps in (43, 60, 43):
        x = torch.randn(steps, 3, 2)
        expected, found = model(x), fast(x)
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(each.sum(), [*model.parameters()]) for each in (found, expected))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert not fast.reroll_caller.is_read
    assert reroll.explain(fast, x).loops


def test_a_layer_of_every_4th_state_is_right() -> None:
    first, second = nn.LSTM(2, 4), nn.GRU(4, 3)

    def model(x: Tensor) -> Tensor:
        made: Tensor = second(first(x)[0][1::4])[0]
        return made

    compiled = reroll.compile(model, lowering="eager")
    for steps in (60, 61):
        x = torch.randn(steps, 3, 2)
        torch.testing.assert_close(compiled(x), model(x))


def test_every_5th_row_is_found_at_every_length() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        rows = [h]
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + 0.5 * h)
            rows.append(h)
        return torch.stack(rows)[1::5]

    fast = reroll.compile(model, lowering="eager")
    for steps in (12, 22, 25, 33, 40):
        x = torch.randn(steps, 3, 2, requires_grad=True)
        grads = (torch.autograd.grad(each(x).sum(), x)[0] for each in (fast, model))
        torch.testing.assert_close(*grads)
        assert reroll.explain(fast, x).loops, steps
