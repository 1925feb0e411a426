"""Loops that read what others scatter: torch's inductor fused them, and read what was to be scattered in its place.

The backwards of these steps scatter gradients to where values came from, and add them to those of the next step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import reroll

D = torch.float64
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sorted": lambda h, x: h + h.sort(1).values + 0.1 * x,
    "sorted and halved": lambda h, x: (h + h.sort(1).values + 0.1 * x) * 0.5,
    "largest": lambda h, x: h + 0.3 * h.topk(2, 1).values.repeat(1, 2) + x,
    "largest so far": lambda h, x: h + 0.3 * h.cummax(1).values + x,
    "median": lambda h, x: h - 0.5 * h.median(1, keepdim=True).values + x,
    "gathered": lambda h, x: h + h.gather(1, torch.tensor([[1, 3, 0, 1]]).expand(3, 4)) + x,
    "added at places": lambda h, x: h + torch.zeros_like(h).index_add(1, torch.tensor([2, 0, 2, 1]), h) * 0.5 + x,
    "put at places": lambda h, x: h * 0.5 + x.index_put((torch.tensor([0, 2]), torch.tensor([1, 3])), h[:2, 0]),
    "chosen by the largest": lambda h, x: h + x + 0.2 * h.max(1, keepdim=True).values,
}


class Scattering(nn.Module):
    """A loop whose first state is one row for all: (T, 3, 4) to (3, 4)."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.step, self.start = step, nn.Parameter(torch.randn(4, dtype=D) * 0.4)

    def forward(self, x_TBH: Tensor) -> Tensor:
        h_BH = self.start.expand(3, 4)
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(self.step(h_BH, x_TBH[t]))
        return h_BH


@pytest.mark.variants(4)
@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("segment", [pytest.param(3, marks=pytest.mark.campaign), 5])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_nothing_is_read_before_it_is_scattered(step: Callable[[Tensor, Tensor], Tensor], segment: int) -> None:
    torch.manual_seed(0)
    model, x_TBH = Scattering(step), torch.randn(15, 3, 4, dtype=D).requires_grad_()
    compiled = torch.compile(model, backend="reroll", options={"segment": segment, "schedule": "standard"})
    reroll.check(compiled, x_TBH, strict=True, measure=False)
