"""Network D2r: a recurrent LIF network of 64 inputs, 256 neurons and 10 readouts, averaged over time inside the loop.

Shape letters: T steps, B batch, I inputs, H neurons, O readouts. The figures of plain BPTT were measured on this form:
128.7 MiB at T=1,024 and batch 32, and 6.9 MiB with ``torch.utils.checkpoint`` over segments of sqrt(T) steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Spike(torch.autograd.Function):
    """1 where u is above 0; the surrogate gradient is 1 / (1 + (pi u)^2)."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        """The spikes."""
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient through the surrogate."""
        (u,) = ctx.saved_tensors
        surrogate: Tensor = grad / (1 + (torch.pi * u) ** 2)
        return surrogate


class NetworkD(nn.Module):
    """``v = 0.9 v (1 - z) + Wi x + Wr z``, ``z = (v > 1)``; gives the mean of ``Wo z`` over time."""

    def __init__(self, neurons: int = 256) -> None:
        super().__init__()
        self.wi = nn.Linear(64, neurons)
        self.wr = nn.Linear(neurons, neurons, bias=False)
        self.wo = nn.Linear(neurons, 10)
        with torch.no_grad():
            self.wi.weight.mul_(3)  # about 14 % of the neurons fire at a step

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The averaged readout, (B, O)."""
        steps, batch, _ = x_TBI.shape
        v_BH = z_BH = x_TBI.new_zeros(batch, self.wr.in_features)
        mean_BO = x_TBI.new_zeros(batch, self.wo.out_features)
        for t in range(steps):
            v_BH = 0.9 * v_BH * (1 - z_BH) + self.wi(x_TBI[t]) + self.wr(z_BH)
            z_BH = Spike.apply(v_BH - 1.0)  # type: ignore[no-untyped-call]
            mean_BO = mean_BO + self.wo(z_BH) / steps
        return mean_BO


class Checkpointed(nn.Module):
    """Network D with ``torch.utils.checkpoint`` over segments of about sqrt(T) steps."""

    def __init__(self, network: NetworkD) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The averaged readout, (B, O)."""
        steps, batch, _ = x_TBI.shape
        length = max(round(math.sqrt(steps)), 1)
        v_BH = z_BH = x_TBI.new_zeros(batch, self.network.wr.in_features)
        mean_BO = x_TBI.new_zeros(batch, self.network.wo.out_features)
        for start in range(0, steps, length):
            part = x_TBI[start : start + length]
            v_BH, z_BH, mean_BO = checkpoint(self.segment, part, v_BH, z_BH, mean_BO, steps, use_reentrant=False)
        return mean_BO

    def segment(
        self, x_TBI: Tensor, v_BH: Tensor, z_BH: Tensor, mean_BO: Tensor, steps: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The carry after a few steps."""
        net = self.network
        for t in range(x_TBI.shape[0]):
            v_BH = 0.9 * v_BH * (1 - z_BH) + net.wi(x_TBI[t]) + net.wr(z_BH)
            z_BH = Spike.apply(v_BH - 1.0)  # type: ignore[no-untyped-call]
            mean_BO = mean_BO + net.wo(z_BH) / steps
        return v_BH, z_BH, mean_BO


def inputs(steps: int, batch: int) -> Tensor:
    """Inputs (T, B, I) from a fixed seed."""
    return torch.randn(steps, batch, 64, generator=torch.Generator().manual_seed(1))
