"""Joined buffers (``torch.cat``): torch's inductor wrote a result over a part of one that it then gave away.

Neurons with a threshold that adapts, as Norse's LSNN: the recurrent products of two steps are one product of joined
rows; in a segment of six steps the spikes of the second one, kept as bits, were wrong, and so all gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

D = torch.float64


class Spike(torch.autograd.Function):
    """A step with a smooth derivative."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (v,) = ctx.saved_tensors
        return grads[0] / (1 + 10 * v.abs()).square()


class Adaptive(nn.Module):
    """Spiking neurons (Bellec et al., arXiv 1803.09574) whose recurrent input arrives a step late, and a readout."""

    def __init__(self, inputs: int, neurons: int) -> None:
        super().__init__()
        self.read = nn.Linear(inputs, neurons, bias=False)
        self.back = nn.Linear(neurons, neurons, bias=False)
        self.out = nn.Linear(neurons, 10)
        values = map(torch.tensor, (0.0, 1.0, 0.0, 1.8))
        self.leak, self.threshold, self.reset, self.jump = map(nn.Buffer, values)

    def forward(self, x: Tensor) -> Tensor:
        v = i = z = x.new_zeros(x.shape[1], self.back.in_features)
        b, outputs = v + self.threshold, []
        for t in range(x.shape[0]):
            v_new, i_new = v + 0.1 * ((self.leak - v) + i), i - 0.2 * i
            b = b + 0.00125 * (self.threshold - b)
            spikes: Tensor = Spike.apply(v_new - b)  # type: ignore[no-untyped-call]
            v = (1 - spikes.detach()) * v_new + spikes.detach() * self.reset
            i = i_new + self.read(x[t]) + self.back(z)
            b = b + spikes.detach() * self.jump
            z = spikes
            outputs.append(self.out(z))
        return torch.stack(outputs)


@pytest.mark.inductor
@pytest.mark.parametrize("segment", [6, *(pytest.param(each, marks=pytest.mark.campaign) for each in (7, 8))])
def test_nothing_is_written_over_a_part_of_a_joined_buffer(segment: int) -> None:
    torch.manual_seed(0)
    model = Adaptive(40, 60).to(D)
    for weight in (model.read.weight, model.back.weight):
        weight.data.mul_(10)
    x = (torch.rand(50, 8, 40) < 0.4).to(D)
    compiled = reroll.compile(model, segment=segment)
    assert model(x).std() > 0.1
    reroll.check(compiled, x, strict=True, measure=False)
