"""Small networks, ways to compile them and a count of what is really rolled: for tests of training loops of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import reroll
from agreement import QUICK
from networks import RecurrentLIF
from reroll.backends.construct.stages.proof import Proof
from reroll.backends.runtime.node import RecurrenceModule

WIDTH = 6
PLAN: dict[str, Any] = {**QUICK, "schedule": "double", "chunk": 4, "slots": 2}


class GatedReader(nn.Module):
    """A loop over a GRU cell, and a readout of its last state; batch_first: the input is [B, T, I]."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(WIDTH, 8), nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x_TBI = x.transpose(0, 1) if self.batch_first else x
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 8)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
        out: Tensor = self.out(h_BH)
        return out


def spiking() -> nn.Module:
    """A recurrent spiking network."""
    return RecurrentLIF(WIDTH, 8, 3)


def through_front(model: nn.Module, **options: Any) -> Any:
    """``reroll.compile``."""
    return reroll.compile(model, **{**PLAN, **options})


def through_backend(model: nn.Module, **options: Any) -> Any:
    """``torch.compile``."""
    return torch.compile(model, backend="reroll", options={**PLAN, **options})


DOORS: dict[str, Callable[..., Any]] = {"compile": through_front, "backend": through_backend}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"gru": GatedReader, "lif": spiking}


@contextmanager
def reversals() -> Iterator[Callable[[], int]]:
    """How many backwards of loops were played under a schedule since the block began, but for those of proofs."""
    prove, proving = Proof.prove, 0

    def proved(*args: Any) -> None:
        nonlocal proving
        before = played.call_count
        prove(*args)
        proving += played.call_count - before

    with (
        mock.patch.object(RecurrenceModule, "reversed", autospec=True, side_effect=RecurrenceModule.reversed) as played,
        mock.patch.object(Proof, "prove", proved),
    ):
        yield lambda: int(played.call_count) - proving


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference of two lists of tensors, of the norm of the second."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)]
    off, whole = sum(float((a - b).square().sum()) for a, b in pairs), sum(float(b.square().sum()) for _, b in pairs)
    return math.sqrt(off / whole)


def trained_alike(found: nn.Module, expected: nn.Module, start: nn.Module, tolerance: float) -> None:
    """Two models went the same way from where they started, to a part of its length."""
    ways = [
        [b.detach() - a.detach() for a, b in zip(start.parameters(), model.parameters(), strict=True)]
        for model in (found, expected)
    ]
    assert all(bool(way.any()) for way in ways[1]), "a parameter was not trained"
    assert distance(ways[0], ways[1]) <= tolerance
