"""Max pooling of spikes behind batch norm: loops that torch 2.13's inductor fuses side by side gave wrong gradients.

From seven steps in a segment on they were 0.15 of the largest entry off, in silence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

D = torch.float64


class Spike(torch.autograd.Function):
    """A step with a smooth derivative."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (v,) = ctx.saved_tensors
        return grads[0] / (1 + (torch.pi * v).square())


class Pooled(nn.Module):
    """Convolution, batch norm, spikes, max pooling and a readout, step by step."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = pool
        self.conv, self.norm = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 64, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v, u, total = x.new_zeros(()), x.new_zeros(()), x.new_zeros(())
        for t in range(x.shape[0]):
            v = v + self.norm(self.conv(x[t]))
            z: Tensor = Spike.apply(v - 1)  # type: ignore[no-untyped-call]
            v = (1 - z) * v
            u = u + (self.out(self.pool(z).flatten(1)) - u) / 2
            y: Tensor = Spike.apply(u - 1)  # type: ignore[no-untyped-call]
            u, total = (1 - y) * u, total + y
        return total / x.shape[0]


POOLS = {
    "max_pool2d": lambda z_BCHW: F.max_pool2d(z_BCHW, 2, 2),
    "amax of windows": lambda z_BCHW: z_BCHW.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2)),
}


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("max_pool2d", 16),
        *(pytest.param(each, 9, marks=pytest.mark.campaign) for each in ("max_pool2d", "amax of windows")),
    ],
)
def test_gradients_behind_max_pooling_are_eagers(name: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Pooled(POOLS[name]).to(D)
    for weight in (model.conv.weight, model.out.weight):
        weight.data.mul_(4)
    x = (torch.rand(steps, 16, 2, 16, 16) < 0.2).to(D)
    reroll.check(reroll.compile(model, segment=7), x, strict=True, measure=False)
