"""Layers that run over all of T one after another, and how they are put together. T steps, B batch, H neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll.backends.dynamo.entry as dynamo
from agreement import compare
from networks import Spike
from reroll.program.registry import run_on_loops
from reroll.recurrence import Capture

T, B, H = 9, 2, 4


class Layer(nn.Module):
    """A spiking layer over all of T: ``v = 0.9 v + x (+ Wr z)``, ``z`` a sigmoid of it, subtracted where it resets."""

    def __init__(self, recurrent: bool = True, dropout: float = 0.0, order: int = 1) -> None:
        super().__init__()
        self.recurrent = nn.Linear(H, H) if recurrent else None
        self.dropout, self.order = dropout, order

    def forward(self, x_TBH: Tensor, v_BH: Tensor | None = None) -> Tensor:
        v_BH = x_TBH.new_zeros(x_TBH.shape[1:]) if v_BH is None else v_BH
        z_BH, out = torch.zeros_like(v_BH), []
        for t in range(x_TBH.shape[0])[:: self.order]:
            v_BH = 0.9 * v_BH + x_TBH[t]
            v_BH = v_BH if self.recurrent is None else v_BH + self.recurrent(z_BH)
            z_BH = F.dropout(torch.sigmoid(4 * v_BH), self.dropout, self.training and self.dropout > 0)
            v_BH = v_BH - z_BH
            out.append(z_BH)
        return torch.stack(out)


class Spiking(Layer):
    """With spikes and their surrogate gradient."""

    def forward(self, x_TBH: Tensor, v_BH: Tensor | None = None) -> Tensor:
        v_BH, out = x_TBH.new_zeros(x_TBH.shape[1:]), []
        for t in range(x_TBH.shape[0]):
            v_BH = 0.9 * v_BH + 3 * x_TBH[t]
            z_BH = Spike.apply(v_BH)  # type: ignore[no-untyped-call]
            v_BH = v_BH - z_BH
            out.append(z_BH)
        return torch.stack(out)


class Leaky(nn.Module):
    """A leaky sum over all of T, without reset: all of its steps are alike."""

    def forward(self, x_TBH: Tensor) -> Tensor:
        v_BH, out = torch.zeros_like(x_TBH[0]), []
        for t in range(x_TBH.shape[0]):
            v_BH = 0.8 * v_BH + x_TBH[t]
            out.append(v_BH)
        return torch.stack(out)


class Net(nn.Module):
    """Modules, and how they are called."""

    def __init__(self, run: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleList(modules), run

    def forward(self, x_TBH: Tensor) -> Any:
        return self.run(x_TBH, *self.parts)


@contextmanager
def fusions() -> Iterator[list[Capture]]:
    """A list that fills with what passes on loops give inside."""
    made: list[Capture] = []

    def noted(*given: Any) -> Capture:
        made.append(run_on_loops(*given))
        return made[-1]

    with mock.patch.object(dynamo, "run_on_loops", noted):
        yield made


def check(model: nn.Module, x: Tensor, **options: Any) -> Capture:
    """Compare with eager in float64; give what was fused."""
    with fusions() as made:
        different, _ = compare(model.double(), (x.double(),), **{"schedule": "store_all", **options})
    assert not different
    return made[-1]


def between(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    return second(middle(first(x)))


def flat(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    """As SpikingJelly's multi-step layers do: time and batch are one dimension for the layer in the middle."""
    y = first(x)
    return second(middle(y.flatten(0, 1)).view(y.shape[0], y.shape[1], -1))


def convolved(x: Tensor, first: nn.Module, conv: nn.Module, second: nn.Module) -> Any:
    y = conv(first(x).flatten(0, 1).view(-1, 1, 2, 2)).flatten(1)
    return second(F.relu(y, inplace=True).view(x.shape[0], x.shape[1], -1))


def with_input(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    return second(middle(torch.cat([first(x), x], -1)) + x)


def kept(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    y = first(x)
    return y, second(middle(y))


def chain(x: Tensor, *layers: nn.Module) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def skipped(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Any:
    y = first(x)
    return third(second(y) + y)


def gathered(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Any:
    return third(first(x) * second(x))


def spread(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Any:
    y = first(x)
    return second(y), third(y)


def batch_first(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    return second(middle(first(x).transpose(0, 1)).transpose(0, 1))


def halves(x: Tensor, first: nn.Module, second: nn.Module) -> Any:
    a, b = first(x).chunk(2, -1)
    return second(torch.cat([b, a.softmax(-1)], -1))


def readout(x: Tensor, first: nn.Module, second: nn.Module, out: nn.Module) -> Any:
    return out(second(first(x))).mean(0)
