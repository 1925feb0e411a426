"""A spiking network beside its compiled twin, for tests that compare the two in one run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from walks import Shared

T, B, I, H = 15, 3, 5, 7  # noqa: E741
DOUBLE: dict[str, Any] = {
    "lowering": "eager",
    "schedule": "double",
    "chunk": 5,
    "slots": 2,
    "segment": 2,
    "remote": "disk",
}
SCHEDULES: list[dict[str, Any]] = [
    {"lowering": "eager", "schedule": "store_all", "replay": True},
    {"lowering": "eager", "segment": 3, "chunk": 6},
    DOUBLE,
    {**DOUBLE, "schedule": "hierarchical", "verify": True},
    {**DOUBLE, "remote": "local", "verify": True},
    {"lowering": "eager", "schedule": "revolve", "segment": 2, "slots": 3, "verify": True},
]


class Spike(torch.autograd.Function):
    """A threshold with the derivative of an arctangent."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (u,) = ctx.saved_tensors
        return grad / (1 + (torch.pi * u) ** 2)


spike: Any = Spike.apply


class Net(nn.Module):
    """A recurrent spiking layer under a tanh readout: outputs of every step, and the last state."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wi, self.wr, self.wo = nn.Linear(I, H), nn.Linear(H, H, bias=False), nn.Linear(H, 2)
        self.dropout = dropout

    def forward(self, x_TBI: Tensor, v_BH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        v_BH = x_TBI.new_zeros(x_TBI.shape[1], H) if v_BH is None else v_BH
        z_BH, ys = torch.zeros_like(v_BH), []
        for t in range(x_TBI.shape[0]):
            v_BH = 0.9 * v_BH * (1 - z_BH) + self.wi(x_TBI[t]) + self.wr(z_BH)
            z_BH = spike(v_BH - 0.3)
            z_BH = nn.functional.dropout(z_BH, self.dropout, self.training)
            ys.append(torch.tanh(self.wo(z_BH + 0.1 * v_BH)))
        return torch.stack(ys), v_BH


def compiled(model: nn.Module, **options: Any) -> Any:
    """The model under the backend; an error if it would not be one graph."""
    return Shared(model, {"on_no_recurrence": "error", **options})


def pair(options: dict[str, Any], make: Callable[[], nn.Module] = Net) -> tuple[Any, Any, Any]:
    """(plain model, its twin, the twin compiled) in float64."""
    plain = make().double()
    twin = copy.deepcopy(plain)
    return plain, twin, compiled(twin, **options)


def data(requires_grad: bool = False) -> Tensor:
    return torch.randn(T, B, I, dtype=torch.float64, requires_grad=requires_grad)


def loss_of(outputs: tuple[Tensor, Tensor]) -> Any:
    return outputs[0].square().mean() + outputs[1].sin().sum()


def grad_of(parameter: Tensor) -> Tensor:
    """A gradient that must be there."""
    assert parameter.grad is not None
    return parameter.grad


def same(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal to 1e-12 relative of the largest entry, and not trivially so."""
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        scale = float(expected.abs().max())
        assert float((actual - expected).abs().max()) <= 1e-12 * max(scale, 1e-30)


def same_grads(twin: nn.Module, plain: nn.Module) -> None:
    for actual, expected in zip(twin.parameters(), plain.parameters(), strict=True):
        same(actual.grad, expected.grad)
