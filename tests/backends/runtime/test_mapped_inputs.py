"""Sequences in files that are mapped into memory: read a segment at a time, and never copied whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll

STEPS, BATCH, WIDTH = 300, 4, 512
LAYOUTS: dict[str, tuple[int, ...]] = {"time first": (STEPS, BATCH, WIDTH), "batch first": (BATCH, STEPS, WIDTH)}


class Reader(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell, self.dim = nn.GRUCell(WIDTH, 5), dim

    def forward(self, x: Tensor) -> Tensor:
        h_BN = x.new_zeros(BATCH, 5)
        for x_BI in x.unbind(self.dim):
            h_BN = self.cell(x_BI, h_BN)
        return h_BN


def mapped(folder: Path, way: str, shape: tuple[int, ...]) -> Tensor:
    """A sequence in a file."""
    path, size = folder / "sequence", STEPS * BATCH * WIDTH
    torch.randn(shape).numpy().tofile(path)
    if way == "from_file":
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.float32).view(shape)
    return torch.from_numpy(np.memmap(path, np.float32, "r+", shape=shape))


@pytest.mark.parametrize(("way", "layout"), [("from_file", "time first"), ("memmap", "batch first")])
def test_a_sequence_in_a_file_is_not_copied(way: str, layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, dim = mapped(tmp_path, way, LAYOUTS[layout]), int(layout == "batch first")
    model = Reader(dim)
    run: Any = reroll.compile(model, time_dim=dim, schedule="double", remote="disk", lowering="eager")
    reroll.check(run, x, strict=True, measure=False)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(x).square().sum().backward()

    assert reroll.measure(step, exclude=[model]).local_peak < x.nbytes / 10
    assert reroll.explain(run, x).predicted_peak < x.nbytes / 10
