"""A GRU in float64, and what tests of plans ask of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import reroll

T, B, I, H = 60, 4, 3, 8  # noqa: E741  # steps, batch, inputs, neurons


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(I, H), nn.Linear(H, 2)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
        return self.out(h_BH)  # type: ignore[no-any-return]


def gradients(model: nn.Module, call: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    call(x).square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-13)


def compiled(model: nn.Module, **options: Any) -> Any:
    return reroll.compile(model, **{"lowering": "eager", "verify": True, **options})


def schedule_of(model: Any, x: Tensor) -> str:
    return reroll.explain(model, x).loops[0].choice.schedule
