"""Networks of repeated blocks, each with weights of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Layer(nn.Module):
    """A residual layer. ``p``: of dropout; ``scale``: of what the layer adds; ``norm``: of its inputs."""

    def __init__(
        self,
        act: Callable[[Tensor], Tensor] = F.gelu,
        p: float = 0.0,
        scale: float = 1.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act, self.p, self.scale = act, p, scale

    def forward(self, x_BC: Tensor) -> Tensor:
        y_BC = self.down(self.act(self.up(self.norm(x_BC))))
        return x_BC + self.scale * F.dropout(y_BC, self.p, self.training)


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + torch.tanh(self.base(x_BC) + self.b(self.a(x_BC)))


class Stack(nn.Module):
    """A layer that embeds, blocks, and a readout; with ``hidden`` also all that the blocks give."""

    def __init__(self, *blocks: nn.Module, hidden: bool = False) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 3)
        self.hidden = hidden

    def forward(self, x_BC: Tensor) -> Any:
        x_BC, found = self.first(x_BC), []
        for block in self.blocks:
            x_BC = block(x_BC)
            found.append(x_BC)
        return (self.last(x_BC), found) if self.hidden else self.last(x_BC)


class Skips(nn.Module):
    """Blocks down, and blocks up that read what those gave, the last first."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(Layer() for _ in range(depth)) for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x_BC: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x_BC = block(x_BC)
            kept.append(x_BC)
        for block, join, skip in zip(self.up, self.join, reversed(kept), strict=True):
            x_BC = block(join(torch.cat([x_BC, skip], -1)))
        return x_BC


class Shared(nn.Module):
    """Blocks that read one memory and one table, as decoders do."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.queries, self.keys = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth)) for _ in range(2))
        self.memory, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x_BC: Tensor) -> Tensor:
        memory_BC = torch.tanh(self.memory(x_BC))
        x_BC = torch.ones_like(x_BC)
        for query, key in zip(self.queries, self.keys, strict=True):
            seen = torch.softmax(query(x_BC) * self.table.cos() @ key(memory_BC).t(), -1)
            x_BC = x_BC + seen @ memory_BC
        return x_BC


def layers(count: int = 8, **kinds: Any) -> list[nn.Module]:
    """Equal layers."""
    return [Layer(**kinds) for _ in range(count)]


def frozen(blocks: list[nn.Module], which: Callable[[int], bool]) -> list[nn.Module]:
    """The blocks, some of them frozen."""
    for number, block in enumerate(blocks):
        block.requires_grad_(not which(number))
    return blocks


def frozen_first(blocks: int) -> Stack:
    """A network whose embedding and first blocks are frozen."""
    model = Stack(*frozen(layers(), lambda number: number < blocks))
    model.first.requires_grad_(False)
    return model


def partly_tied() -> Stack:
    """Blocks that share one of their layers."""
    blocks: list[Any] = layers()
    for block in blocks:
        block.up = blocks[0].up
    return Stack(*blocks)


# name: (network, the number of steps of each loop)
DEEP: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "equal": (lambda: Stack(*layers()), [8]),
    "dropout of two rates": (lambda: Stack(*layers(4, p=0.1), *layers(4, p=0.3)), [8]),
    "two in turn": (lambda: Stack(*(Layer(F.gelu if n % 2 else torch.tanh) for n in range(8))), [4]),
    "an odd one": (lambda: Stack(*layers(4), Layer(torch.tanh), *layers(4)), [4, 4]),
    "skips": (Skips, [4, 5]),
    "all hidden states": (lambda: Stack(*layers(), hidden=True), [8]),
    "adapters": (lambda: Stack(*(Adapted() for _ in range(8))), [8]),
    "the first frozen": (lambda: frozen_first(4), [4, 3]),
    "the last frozen": (lambda: Stack(*frozen(layers(), lambda n: n >= 4)), [4, 4]),
    "every other frozen": (lambda: Stack(*frozen(layers(), lambda n: n % 2 == 1)), [4]),
    "batch norms": (lambda: Stack(*layers(norm=nn.BatchNorm1d)), [8]),
    "one block many times": (lambda: Stack(*[Layer()] * 9), [9]),
    "partly tied": (partly_tied, [8]),
    "scales": (lambda: Stack(*(Layer(scale=1 / (n + 1)) for n in range(8))), [8]),
    "shared memory": (Shared, [5]),
}
