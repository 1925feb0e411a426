"""Pieces around a loop that inductor compiles: parameters that no used result reads have no gradient."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
from reroll.backends.dynamo import surroundings

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
D = torch.float64


class Double(torch.autograd.Function):
    """Twice a value, and no gradient for its scale."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


class Heads(nn.Module):
    """A loop behind a wide layer, with two wide heads, one of which reads the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.cell = nn.Linear(4, 64), nn.Linear(64, 4)
        self.value, self.other = nn.Linear(4, 64), nn.Linear(4, 64)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wide, h, states = torch.tanh(self.before(x.flip(0))), x.new_zeros(3, 4), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(wide[t]) + h)
            states.append(h)
        y = torch.stack(states)
        double: Any = Double.apply
        heads = {"value": torch.tanh(self.value(double(y, self.scale))), "other": torch.tanh(self.other(x))}
        return {"states": y, "wide": wide, **heads}


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "all": lambda result: torch.stack([each.square().mean() for each in result.values()]).sum(),
    **{name: lambda result, name=name: result[name].square().mean() for name in ("states", "wide", "value", "other")},  # type: ignore[misc]
    "two": lambda result: result["wide"].sum() + result["other"].square().sum(),
}


@needs_compiler
@pytest.mark.parametrize("door", ["backend", "compile"])
def test_what_no_used_result_reads_has_no_gradient(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_piece = list[fx.GraphModule](), surroundings._compiled

    def noted(piece: fx.GraphModule) -> nn.Module:
        compiled.append(piece)
        return compile_piece(piece)

    monkeypatch.setattr(surroundings, "_compiled", noted)
    torch.manual_seed(0)
    net, x = Heads().to(D), torch.randn(12, 3, 4, dtype=D, requires_grad=True)
    model = torch.compile(net, backend="reroll") if door == "backend" else reroll.compile(net, time_dim=0)
    for loss in LOSSES.values():
        reroll.check(model, x, loss=loss, strict=True, measure=False)
    assert bool(compiled) == (door == "backend")
