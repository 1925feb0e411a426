"""Networks that tests share. Shape letters: T steps, B batch, I inputs, H neurons, O outputs."""

from typing import Any

import torch
from torch import Tensor, nn


class Clip(torch.autograd.Function):
    """A value as it is; its gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.05, 0.05)


class Spike(torch.autograd.Function):
    """1 where the potential is above 1; the surrogate gradient is 1 / (1 + (pi (v - 1))^2)."""

    @staticmethod
    def forward(ctx, v):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(v)
        return (v > 1).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (v,) = ctx.saved_tensors
        return grad / (1 + (torch.pi * (v - 1)) ** 2)


class RecurrentLIF(nn.Module):
    """Network D of shared/DESIGN.md section 5: ``v = 0.9 v (1 - z) + Wi x + Wr z``, ``z = (v > 1)``, readout ``Wo z``.

    With ``mean`` the readout is averaged in the loop (D2r), else the readouts are stacked: (T, B, O).
    """

    def __init__(self, inputs: int = 64, neurons: int = 256, outputs: int = 10, mean: bool = True) -> None:
        super().__init__()
        self.Wi = nn.Linear(inputs, neurons, bias=False)
        self.Wr = nn.Linear(neurons, neurons, bias=False)
        self.Wo = nn.Linear(neurons, outputs, bias=False)
        self.mean = mean

    def forward(self, x_TBI: Tensor) -> Tensor:
        steps, batch, _ = x_TBI.shape
        v_BH = x_TBI.new_zeros(batch, self.Wr.in_features)
        z_BH = x_TBI.new_zeros(batch, self.Wr.in_features)
        mean_BO, readouts = x_TBI.new_zeros(batch, self.Wo.out_features), []
        for t in range(steps):
            v_BH = 0.9 * v_BH * (1 - z_BH) + self.Wi(x_TBI[t]) + self.Wr(z_BH)
            z_BH = Spike.apply(v_BH)  # type: ignore[no-untyped-call]
            if self.mean:
                mean_BO = mean_BO + self.Wo(z_BH) / steps
            else:
                readouts.append(self.Wo(z_BH))
        return mean_BO if self.mean else torch.stack(readouts)


def spikes(steps: int, batch: int = 32, inputs: int = 64) -> Tensor:
    """Input trains that make about a seventh of network D's neurons fire per step."""
    return (torch.rand(steps, batch, inputs) < 0.2).float() * 2


class Half(nn.Module):
    """A loop under autocast, whose result and gradients are in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(3, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 16)
        with torch.autocast("cpu", torch.bfloat16):
            for t in range(x.shape[0]):
                h = torch.tanh(self.taken(x[t]) + self.back(h))
        return h.float()


class Deciding(nn.Module):
    """Each entry of a row decides what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_TB: Tensor) -> Tensor:
        h_B = x_TB[0] * self.scale
        for x_B in x_TB.unbind(0):
            h_B = torch.where(x_B * self.scale > 0.3, 2.0, 0.5) + 0.1 * h_B.tanh() * x_B
        return h_B
