"""Networks of many styles, each a function of a module with shared parts and of the inputs.

``zoo_*.py`` hold them; ``load()`` gives them by name. B batch, T time, F = ``SIZE`` features: inputs are [T, B, F].
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 6
LONGEST = 40
_FILES = ("cells", "neurons", "inplace", "time", "lists", "odd")


@dataclass(frozen=True)
class Network:
    """A network, and what is known of it.

    found: (steps, carries) of each recurrence when it runs ``steps`` steps. inputs: the inputs for a length. leaf:
    whether the inputs may be leaves (torch refuses in-place updates of a leaf). calls: calls in a row.
    """

    forward: Callable[..., Any]
    found: tuple[tuple[int, int], ...]
    inputs: Callable[[int], tuple[Any, ...]]
    leaf: bool
    calls: int
    steps: int


class Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        v: Tensor = ctx.saved_tensors[0]
        return grad / (1 + (math.pi * v) ** 2)


class StochasticSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        p = torch.sigmoid(v)
        z = torch.bernoulli(p)
        ctx.save_for_backward(p, z)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        p: Tensor
        z: Tensor
        p, z = ctx.saved_tensors
        return grad * p * (1 - p) * (1 + z)


def spike(v: Tensor) -> Tensor:
    """1 where v is positive, with a surrogate gradient."""
    found: Tensor = Surrogate.apply(v)  # type: ignore[no-untyped-call]
    return found


def random_spike(v: Tensor) -> Tensor:
    """1 with probability sigmoid(v)."""
    found: Tensor = StochasticSpike.apply(v)  # type: ignore[no-untyped-call]
    return found


class Net(nn.Module):
    """The parts that the networks share, around one of them."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.l = nn.Linear(SIZE, SIZE)
        self.r = nn.Linear(SIZE, SIZE)
        self.o = nn.Linear(SIZE, 3)
        self.gate = nn.Linear(2 * SIZE, 4 * SIZE)
        self.lstm = nn.LSTMCell(SIZE, SIZE)
        self.gru = nn.GRUCell(SIZE, SIZE)
        self.rnn, self.rnn2 = nn.RNNCell(SIZE, SIZE), nn.RNNCell(SIZE, SIZE)
        self.bn = nn.BatchNorm1d(SIZE)
        self.ln = nn.LayerNorm(SIZE)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.h0 = nn.Parameter(torch.randn(1, SIZE))
        self.w = nn.Parameter(torch.rand(LONGEST, SIZE))
        self.beta = nn.Parameter(torch.tensor(0.9))
        self.scale: Tensor
        self.count: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1, SIZE))
        self.register_buffer("count", torch.zeros(()))
        self.h: Tensor | None = None

    def forward(self, *inputs: Any) -> Any:
        return self.network.forward(self, *inputs)


_ZOO: dict[str, Network] = {}


def one_input(steps: int) -> tuple[Tensor]:
    """[T, 2, F]."""
    return (torch.randn(steps, 2, SIZE),)


def zoo(
    found: tuple[tuple[int, int], ...],
    inputs: Callable[[int], tuple[Any, ...]] = one_input,
    leaf: bool = True,
    calls: int = 1,
    steps: int = 9,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a network."""

    def enter(forward: Callable[..., Any]) -> Callable[..., Any]:
        _ZOO[forward.__name__] = Network(forward, found, inputs, leaf, calls, steps)
        return forward

    return enter


def load() -> dict[str, Network]:
    """All networks by name."""
    for name in _FILES:
        importlib.import_module(f"zoo_{name}")
    return _ZOO


def zeros(x: Tensor, size: int | None = None) -> Tensor:
    """An initial state [B, size]; as wide as the input by default."""
    return x.new_zeros(x.shape[1], x.shape[-1] if size is None else size)
