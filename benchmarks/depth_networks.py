"""Deep networks for measurements of blocks over depth: what they are, their inputs, and a loss.

Shape letters: B batch, S tokens or pixels, C channels, H heads, X and Y pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, TOKENS = 256, 256


class Block(nn.Module):
    """A pre-norm block of a transformer: attention, then a layer of four times the width."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """The same shape."""
        batch, tokens, width = x_BSC.shape
        qkv = self.qkv(self.norm1(x_BSC)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x_BSC = x_BSC + self.back(seen.transpose(1, 2).reshape(batch, tokens, width))
        y_BSC: Tensor = self.down(F.gelu(self.up(self.norm2(x_BSC))))
        return x_BSC + y_BSC


class GPT(nn.Module):
    """A small GPT over characters."""

    def __init__(self, blocks: int, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, text_BS: Tensor) -> Tensor:
        """Logits of the next characters, (B, S, WORDS)."""
        x_BSC = self.embedding(text_BS) + self.places(torch.arange(text_BS.shape[1], device=text_BS.device))
        for block in self.blocks:
            x_BSC = block(x_BSC)
        logits: Tensor = self.head(self.norm(x_BSC))
        return logits


class ViT(nn.Module):
    """Patches of an image, a token of their own for the class, and blocks of a transformer."""

    def __init__(self, blocks: int, width: int = 192, patch: int = 4, pixels: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (pixels // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 3, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x_BCXY: Tensor) -> Tensor:
        """Logits of classes, (B, 10)."""
        x_BSC = self.patches(x_BCXY).flatten(2).transpose(1, 2)
        x_BSC = torch.cat([self.first.expand(x_BSC.shape[0], -1, -1), x_BSC], 1) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(x_BSC))[:, 0])
        return logits


class Residual(nn.Module):
    """Two convolutions with batch norms and a way past them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.past = nn.Identity() if stride == 1 and before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x_BCXY: Tensor) -> Tensor:
        """Half as many pixels with a stride of two."""
        y_BCXY = F.relu(self.norm1(self.conv1(x_BCXY)))
        return F.relu(self.past(x_BCXY) + self.norm2(self.conv2(y_BCXY)))


class ResNet(nn.Module):
    """Stages of equal blocks, each with twice the channels and a quarter of the pixels of the one before."""

    def __init__(self, blocks: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1)]
        before = widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks):
                layers.append(Residual(before, width, 2 if number == 0 and stage else 1))
                before = width
        self.stages, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], 10)

    def forward(self, x_BCXY: Tensor) -> Tensor:
        """Logits of classes, (B, 10)."""
        logits: Tensor = self.head(self.stages(x_BCXY).mean((2, 3)))
        return logits


class UNet(nn.Module):
    """Residual blocks down and up at one size, where those on the way up also read what those on the way down gave."""

    def __init__(self, blocks: int, width: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        self.down = nn.ModuleList(Residual(width, width) for _ in range(blocks))
        self.join = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(blocks))
        self.up = nn.ModuleList(Residual(width, width) for _ in range(blocks))

    def forward(self, x_BCXY: Tensor) -> Tensor:
        """An image, (B, 3, X, Y)."""
        x_BCXY, kept = self.first(x_BCXY), []
        for block in self.down:
            x_BCXY = block(x_BCXY)
            kept.append(x_BCXY)
        for join, block, skipped in zip(self.join, self.up, reversed(kept), strict=True):
            x_BCXY = block(join(torch.cat([x_BCXY, skipped], 1)))
        image: Tensor = self.last(x_BCXY)
        return image


class Mixer(nn.Module):
    """MLP-Mixer: layers over places, then over channels."""

    def __init__(self, blocks: int, width: int = 128, places: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(Mixing(width, places) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x_BCXY: Tensor) -> Tensor:
        """Logits of classes, (B, 10)."""
        logits: Tensor = self.head(self.blocks(self.patches(x_BCXY).flatten(2).transpose(1, 2)).mean(1))
        return logits


class Mixing(nn.Module):
    """A block of MLP-Mixer."""

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up1, self.down1 = nn.Linear(places, 2 * places), nn.Linear(2 * places, places)
        self.up2, self.down2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """The same shape."""
        mixed = self.down1(F.gelu(self.up1(self.norm1(x_BSC).transpose(1, 2)))).transpose(1, 2)
        x_BSC = x_BSC + mixed
        y_BSC: Tensor = self.down2(F.gelu(self.up2(self.norm2(x_BSC))))
        return x_BSC + y_BSC


class Words(nn.Module):
    """A model of transformers that gives logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text_BS: Tensor) -> Tensor:
        """Logits, (B, S, WORDS)."""
        logits: Tensor = self.model(text_BS, use_cache=False).logits
        return logits


def bert(blocks: int) -> nn.Module:
    """BERT of transformers with a width of 256, and its dropout."""
    from transformers import BertConfig, BertForMaskedLM

    model: Any = BertForMaskedLM(BertConfig(**_sizes(blocks, inner=1024)))
    return Words(model)


def llama(blocks: int) -> nn.Module:
    """LLaMA of transformers with a width of 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**_sizes(blocks, inner=688)))
    return Words(model)


def _sizes(blocks: int, inner: int) -> dict[str, Any]:
    """A small configuration of transformers; ``inner``: the width of the layer inside of a block."""
    width = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": inner}
    return {"vocab_size": WORDS, "max_position_embeddings": TOKENS, "num_hidden_layers": blocks, **width}


def text(batch: int, tokens: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Characters, and those that follow."""
    return lambda: (torch.randint(WORDS, (batch, tokens)), torch.randint(WORDS, (batch, tokens)))


def images(batch: int, classes: bool = True) -> Callable[[], tuple[Tensor, Tensor]]:
    """Images of 32 by 32, and their classes or other images."""
    return lambda: (
        torch.randn(batch, 3, 32, 32),
        torch.randint(10, (batch,)) if classes else torch.randn(batch, 3, 32, 32),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A network by its number of blocks, its batch, and the numbers of blocks that are measured."""

    make: Callable[[int], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    blocks: tuple[int, ...]


NETWORKS = {
    "GPT": Case(GPT, text(4, TOKENS), (12, 24, 48)),
    "BERT": Case(bert, text(4, 128), (8, 24)),
    "LLaMA": Case(llama, text(4, 128), (8, 24)),
    "ViT": Case(ViT, images(8), (12,)),
    "ResNet": Case(ResNet, images(8), (8,)),
    "U-Net": Case(UNet, images(8, classes=False), (6,)),
    "MLP-Mixer": Case(Mixer, images(8), (12,)),
}


def loss_of(found: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy with classes, else the mean square."""
    if wanted.is_floating_point():
        return F.mse_loss(found, wanted)
    return F.cross_entropy(found.flatten(0, -2), wanted.flatten())
