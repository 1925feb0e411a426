"""Several threads call one compiled model."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks import Spike

pytestmark = pytest.mark.usefixtures("double_precision")
LENGTHS = (33, 21, 26, 35, 40, 47)


class Spiking(nn.Module):
    """Neurons whose spikes are made by a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)

    def forward(self, x_TBI: Tensor) -> Tensor:
        z_BH = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for t in range(x_TBI.shape[0]):
            z_BH = Spike.apply(1 + self.taken(x_TBI[t]) + self.back(z_BH) + 0.5 * z_BH)  # type: ignore[no-untyped-call]
        return z_BH


def test_first_calls_at_many_lengths_at_once() -> None:
    model = Spiking()
    compiled = reroll.compile(model, time_dim=0, lowering="eager")

    def gradients(call: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad(call(x).sum(), [x, *model.parameters()]))

    xs = [torch.randn(steps, 2, 3) for steps in LENGTHS]
    expected = [gradients(model, x) for x in xs]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(xs)) as threads:
            found = list(threads.map(lambda x: gradients(compiled, x), [*xs, *xs]))
    finally:
        sys.setswitchinterval(before)
    for ones, others in zip(found, expected * 2, strict=True):
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
