"""Sequences in files that are mapped into memory: read a segment at a time, and never copied whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.tiers import mapped as cut
from reroll.errors import StorageError

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
    run: Any = reroll.compile(model, schedule="double", remote="disk", lowering="eager")
    reroll.check(run, x, strict=True, measure=False)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(x).square().sum().backward()

    assert reroll.measure(step, exclude=[model]).local_peak < x.nbytes / 10
    assert reroll.explain(run, x).predicted_peak < x.nbytes / 10


@pytest.mark.parametrize("when", ["before a call", "before a backward"])
@pytest.mark.parametrize("way", ["from_file", "memmap"])
def test_a_file_that_was_cut_is_refused_before_it_is_read(
    way: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read what was cut off would end the process."""
    monkeypatch.setattr(cut, "LEAST", 2**20)
    x, model = mapped(tmp_path, way, LAYOUTS["time first"]), Reader(0)
    run: Any = reroll.compile(model, schedule="standard", lowering="eager")
    loss = run(x).sum()
    loss.backward()
    gradient = model.cell.weight_ih.grad
    model.zero_grad(set_to_none=True)
    if when == "before a backward":
        loss = run(x).sum()
    os.truncate(tmp_path / "sequence", x.nbytes // 2)
    told = rf"line \d+.*reads a sequence in the file .*sequence, of which it needs {x.nbytes:,} bytes"
    with pytest.raises(StorageError, match=told):
        run(x) if when == "before a call" else loss.backward()
    assert all(each.grad is None for each in model.parameters())
    assert gradient is not None


def test_a_file_is_looked_at_by_its_number_and_only_if_it_has_a_size(tmp_path: Path) -> None:
    path = tmp_path / "sequence"
    path.write_bytes(bytes(4096))
    inode = path.stat().st_ino
    assert cut.Mapped(path, inode, 8192).cut == 4096
    assert cut.Mapped(path, inode, 4096).cut is None
    assert cut.Mapped(path, -1, 8192).cut is None  # another file has its path now
    assert cut.Mapped(Path("/dev/zero"), Path("/dev/zero").stat().st_ino, 8192).cut is None
    path.unlink()
    assert cut.Mapped(path, inode, 8192).cut is None


@pytest.mark.parametrize("name", ["numbers", "with space", "with\nline", os.fsdecode(b"not \xff utf-8")])
def test_a_part_of_a_file_must_be_there_up_to_its_last_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "LEAST", 200_000)
    path = tmp_path / name
    np.arange(65536, dtype=np.float32).tofile(path)
    whole = torch.from_numpy(np.memmap(path, np.float32, "r+", shape=(256, 256)))
    os.truncate(path, 4 * 65536 - 8192)
    cut.forbid_cut_files([whole[:224], whole[:, :8][:224], torch.zeros(1 << 20), whole[:0]], "a line")
    for part in (whole, whole.t(), whole[:, :8]):  # the last has few bytes, over all of the file
        with pytest.raises(StorageError, match="it was cut after it was mapped"):
            cut.forbid_cut_files([part], "a line")
