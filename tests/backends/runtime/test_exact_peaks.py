"""Predicted peaks of deep networks are the measured ones, to the byte, where no operation has memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

PLANS: dict[str, dict[str, Any]] = {
    "standard": {"schedule": "standard"},
    "store_all": {"schedule": "store_all"},
    "a third": {"memory_budget": 0.33},
    "a half": {"memory_budget": 0.5},
}


class Block(nn.Module):
    """A block of a transformer, without dropout: its attention draws no random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.back = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_BSC)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSC = x_BSC + self.back(seen)
        y_BSC: Tensor = self.down(F.gelu(self.up(x_BSC)))
        return x_BSC + y_BSC


class Reader(nn.Module):
    """Words, ten blocks, and a loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(Block(width) for _ in range(10))

    def forward(self, words_BS: Tensor) -> Tensor:
        x_BSC = self.words(words_BS)
        for block in self.blocks:
            x_BSC = block(x_BSC)
        return F.cross_entropy(self.out(x_BSC).flatten(0, 1), words_BS.roll(-1, 1).flatten())


def peaks(model: nn.Module, words_BS: Tensor, options: dict[str, Any]) -> tuple[int, int]:
    """The predicted peak of a training step, and the measured one."""
    compiled = reroll.compile(model, **options)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(words_BS).backward()

    step()
    model.zero_grad(set_to_none=True)
    return reroll.explain(compiled, words_BS).predicted_peak, reroll.measure(step, exclude=[model]).local_peak


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_predicted_peak_is_the_measured_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    predicted, measured = peaks(Reader(), torch.randint(0, 32, (4, 24)), options)
    assert predicted == measured
