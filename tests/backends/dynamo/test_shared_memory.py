"""Arguments that share memory, of which the model changes one in place: refused, unless they only lie side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.errors import UnsupportedError

D = torch.float64


class Scaling(nn.Module):
    """Changes its second argument, then runs over its first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4, dtype=D)

    def forward(self, x: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        other = torch.from_numpy(y) if isinstance(y, np.ndarray) else y
        other.mul_(2)
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(x[t]) + h)
        return h, other.sum()


def doors() -> list[Any]:
    torch.manual_seed(0)
    net = Scaling()
    backend = torch.compile(net, backend="reroll", options={"lowering": "eager"})
    return [backend, reroll.compile(net, lowering="eager")]


@pytest.mark.parametrize("door", [0, 1], ids=["backend", "compile"])
@pytest.mark.parametrize("arrays", [False, True])
def test_windows_of_one_memory_are_refused(door: int, arrays: bool) -> None:
    model, values = doors()[door], np.random.default_rng(0).normal(size=(13, 3, 4))
    second: Any = values[:-1] if arrays else torch.from_numpy(values)[:-1]
    with pytest.raises(UnsupportedError, match=r"shares memory with|other\.mul_"):
        model(torch.from_numpy(values)[1:], second)


@pytest.mark.parametrize("door", [0, 1], ids=["backend", "compile"])
def test_neighbours_and_copies_are_not(door: int) -> None:
    model, values = doors()[door], torch.randn(24, 3, 4, dtype=D)
    pairs = [(values[:12].clone(), values[12:])]
    if door == 0:  # the other one tells memory apart by whole storages
        pairs.append((values[:12], values[12:]))
    for x, y in pairs:
        expected = doors()[0]._orig_mod(x, y.clone())
        for actual, wanted in zip(model(x, y.clone() if x is not values[:12] else y), expected, strict=True):
            torch.testing.assert_close(actual, wanted)
