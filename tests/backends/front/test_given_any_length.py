"""Loops and steps that Dynamo shows as such, through ``reroll.compile``: one program for every number of steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import reroll
from agreement import differences, results

B, I, H = 3, 5, 7  # noqa: E741
LENGTHS = (21, 34, 2, 1)


pytestmark = pytest.mark.usefixtures("double_precision")


class Scan(nn.Module):
    """A recurrent layer by ``torch.scan`` while it is compiled, by a loop otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.r = nn.Linear(I, H), nn.Linear(H, H)

    def step(self, h_BH: Tensor, x_BI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = torch.tanh(self.l(x_BI) + self.r(h_BH))
        return h_BH.clone(), h_BH * 2

    def forward(self, x_TBI: Tensor) -> Any:
        return scan(self.step, x_TBI.new_zeros(B, H), x_TBI)


@torch.compiler.nested_compile_region
def region(layer: Scan, h_BH: Tensor, x_BI: Tensor) -> Tensor:
    return torch.tanh(layer.l(x_BI) + layer.r(h_BH))


class Regions(Scan):
    """The same, its steps marked as regions."""

    def forward(self, x_TBI: Tensor) -> Any:
        h_BH, rows = x_TBI.new_zeros(B, H), []
        for t in range(x_TBI.shape[0]):
            h_BH = region(self, h_BH, x_TBI[t])
            rows.append(h_BH)
        return torch.stack(rows), h_BH


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(I, H, 2, dropout=0.3),
    "projected lstm": lambda: nn.LSTM(I, H, proj_size=4),
    "gru both ways": lambda: nn.GRU(I, H, 2, bidirectional=True),
    "scan": Scan,
    "regions": Regions,
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", NETWORKS)
def test_any_length(name: str) -> None:
    if torch.__version__ < "2.13" and name != "gru both ways":
        pytest.skip("torch 2.11 and 2.12: wrong shapes of nn.LSTM's last states, wrong gradients of eager scan")
    plain = NETWORKS[name]()
    twin = copy.deepcopy(plain)
    fast = reroll.compile(twin, lowering="eager")
    for steps in LENGTHS:
        x = torch.randn(steps, B, I)
        assert not differences(results(fast, twin, (x,)), results(plain, plain, (x,)))
