"""Blocks over depth on a card: transformers and residual networks under budgets, and with carries on the host."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from on_card import DOUBLE, SINGLE, agrees

WORDS, TOKENS, WIDTH, BLOCKS = 17, 24, 32, 6
PLANS: dict[str, dict[str, Any]] = {
    "auto": {},
    "six tenths": {"memory_budget": 0.6},
    "seven tenths": {"memory_budget": 0.7},
    "host": {"schedule": "double", "segment": 1, "chunk": 3, "slots": 1, "remote": "host"},
}
PRECISIONS = {torch.float32: SINGLE, torch.float64: DOUBLE}
LOWERINGS = pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


class Block(nn.Module):
    """A block of a transformer. ``p``: of dropout, in its attention too."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.p = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), p
        self.qkv, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BSC)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True).transpose(1, 2).flatten(2)
        x_BSC = x_BSC + F.dropout(self.back(seen), self.p)
        y_BSC: Tensor = self.down(F.gelu(self.up(self.norm2(x_BSC))))
        return x_BSC + y_BSC


class Gpt(nn.Module):
    """Logits of the next words, (B, S, WORDS)."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text_BS: Tensor) -> Tensor:
        x_BSC = self.words(text_BS) + self.places.weight[: text_BS.shape[1]]
        for block in self.blocks:
            x_BSC = block(x_BSC)
        logits: Tensor = self.head(self.norm(x_BSC))
        return logits


class Residual(nn.Module):
    """Two convolutions with batch norms and a way past them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x_BCXY: Tensor) -> Tensor:
        y_BCXY = F.relu(self.norm1(self.conv1(x_BCXY)))
        return F.relu(x_BCXY + self.norm2(self.conv2(y_BCXY)))


class Stage(nn.Module):
    """Residual blocks of one size, and a readout."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 5)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(BLOCKS)))

    def forward(self, x_BCXY: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.first(x_BCXY)).mean((2, 3)))
        return logits


def check(model: nn.Module, given: list[tuple[Tensor, ...]], tolerance: float, **options: Any) -> None:
    """Compare with eager. The blocks are rolled, all of them."""
    run = agrees(model, lambda twin: reroll.compile(twin, **options), given, tolerance)
    (loop,) = reroll.explain(run, *given[0]).loops
    assert loop.recurrence.blocks
    assert loop.recurrence.steps == BLOCKS


def text(card: torch.device) -> list[tuple[Tensor, ...]]:
    return [(torch.randint(WORDS, (4, TOKENS)).to(card),) for _ in range(3)]


def images(card: torch.device) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(4, 3, 8, 8, dtype=torch.float64).to(card),) for _ in range(3)]


@LOWERINGS
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=["float32", "float64"])
def test_a_transformer(dtype: torch.dtype, plan: str, lowering: str, card: torch.device) -> None:
    """In float32 its attention is a kernel of its own."""
    check(Gpt().to(card, dtype), text(card), PRECISIONS[dtype], lowering=lowering, **PLANS[plan])


@pytest.mark.parametrize("dtype", PRECISIONS, ids=["float32", "float64"])
@pytest.mark.parametrize("plan", ["auto", "host"])
def test_a_transformer_that_draws_random_numbers(plan: str, dtype: torch.dtype, card: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cannot be recorded", reroll.RerollWarning)  # the attention's own numbers
        check(Gpt(p=0.2).to(card, dtype), text(card), PRECISIONS[dtype], lowering="eager", **PLANS[plan])


@LOWERINGS
@pytest.mark.parametrize("plan", PLANS)
def test_a_residual_network_with_running_statistics(plan: str, lowering: str, card: torch.device) -> None:
    model = Stage().double().to(card)
    check(model, images(card), DOUBLE, lowering=lowering, **PLANS[plan])
    norm = model.get_submodule("blocks.5.norm2")
    assert int(norm.get_buffer("num_batches_tracked")) == 3
    assert bool(norm.get_buffer("running_mean").any())
