"""Whatever fails, once, wherever carries are moved or a segment starts: an error or right gradients; then as if nothing
had been."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
import reroll.backends.tiers.host as host
from reroll.backends.runtime.executable import Executable
from reroll.backends.tiers.disk import DiskTier
from reroll.backends.tiers.host import HostTier
from reroll.backends.tiers.spill_file import filesystem

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out")
STEPS = 23


class Net(nn.Module):
    """A carry, dropout, and rows that are given back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, rows = x.new_zeros(3, 4), []
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + nn.functional.dropout(h, 0.2) @ self.weight)
            rows.append(h)
        return h, torch.stack(rows)


def io_error() -> Exception:
    return OSError(errno.EIO, "Input/output error")


def full() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device")


def short_of_memory() -> Exception:
    return MemoryError("no memory")


def broken() -> Exception:
    return RuntimeError("CUDA error: an illegal memory access was encountered")


# (tier, where, name, the error): what a step calls at some time, in the thread of the user or in one of the tier's.
POINTS: dict[str, tuple[str, Any, str, Callable[[], Exception]]] = {
    "disk: bytes are written": ("disk", os, "pwrite", full),
    "disk: bytes are read": ("disk", os, "preadv", io_error),
    "disk: the file is cut": ("disk", os, "ftruncate", io_error),
    "disk: a file is opened": ("disk", tempfile, "TemporaryFile", full),
    "disk: a block is written": ("disk", DiskTier, "write", short_of_memory),
    "disk: a read begins": ("disk", DiskTier, "start_read", short_of_memory),
    "disk: writes are waited for": ("disk", DiskTier, "settle", short_of_memory),
    "host: a block is written": ("host", HostTier, "write", short_of_memory),
    "host: a copy begins": ("host", host, "_copied", short_of_memory),
    "host: a block is read": ("host", host.HostBlock, "read", short_of_memory),
    "a segment starts": ("host", Executable, "run_forward", broken),
    "the backward of a segment starts": ("disk", Executable, "run_backward", broken),
}
NEVER = -1


class Fault:
    """Counts the calls at a point, and raises in place of one of them."""

    def __init__(self, inner: Any, make: Callable[[], Exception], at: int) -> None:
        self.inner, self.make, self.at, self.calls = inner, make, at, 0
        self.lock = threading.Lock()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.calls += 1
            now = self.calls - 1 == self.at
        if now:
            raise self.make()
        return self.inner(*args, **kwargs)


@contextmanager
def fault(where: Any, name: str, make: Callable[[], Exception], at: int) -> Iterator[Fault]:
    """Call number ``at`` of a function fails inside."""
    placed = Fault(getattr(where, name), make, at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, placed)
        yield placed


def step(run: Any, net: Net, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """The gradients of a training step."""
    net.zero_grad()
    given = x.clone().requires_grad_()
    torch.manual_seed(0)
    h, rows = run(given)
    (h.sum() + rows.square().sum()).backward()
    assert given.grad is not None
    return net.weight.grad, given.grad


@pytest.mark.variants(4)
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_is_an_error_or_does_no_harm(point: str, tmp_path: Path) -> None:
    tier, where, name, make = POINTS[point]
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(STEPS, 3, 4, dtype=torch.float64)
    expected = step(net, net, x)
    options: dict[str, Any] = {"schedule": "double", "remote": tier, "segment": 1, "chunk": 4, "slots": 2}

    def fresh() -> Any:
        if tier == "disk":
            options["spill_folder"] = tempfile.mkdtemp(dir=tmp_path)  # a folder's file is opened once
        return reroll.compile(net, lowering="eager", **options)

    run = fresh()
    torch.testing.assert_close(step(run, net, x), expected)
    new = name == "TemporaryFile"
    with fault(where, name, make, NEVER) as counted:
        step(fresh() if new else run, net, x)
    assert counted.calls > 0, "nothing is called here"
    for at in range(counted.calls):
        run = fresh() if new else run
        with fault(where, name, make, at):
            try:
                found = step(run, net, x)
            except (reroll.RerollError, type(make())):
                assert net.weight.grad is None, "a gradient of a step that has failed"
            else:
                torch.testing.assert_close(found, expected)
        torch.testing.assert_close(step(run, net, x), expected)


PLANS: dict[str, dict[str, Any]] = {
    "double": {"schedule": "double", "segment": 1, "chunk": 4, "slots": 2},
    "hrevolve": {"schedule": "hrevolve", "slots": 2},
    "a budget": {"memory_budget": 0.6},
}


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("plan", PLANS)
def test_a_folder_that_vanishes_is_a_storage_error_or_does_no_harm(plan: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, folder = Net().double(), tmp_path / "spill"
    x, longer = (torch.randn(steps, 3, 4, dtype=torch.float64) for steps in (STEPS, 31))
    folder.mkdir()
    run = reroll.compile(net, lowering="eager", remote="disk", spill_folder=folder, **PLANS[plan])
    folder.rmdir()
    with pytest.raises(reroll.StorageError, match=f"{folder}"):
        step(run, net, x)
    assert net.weight.grad is None
    folder.mkdir()
    torch.testing.assert_close(step(run, net, x), step(net, net, x))
    torch.manual_seed(0)
    h, rows = run(x)
    shutil.rmtree(folder)  # its file has no name, and lives on
    found = torch.autograd.grad(h.sum() + rows.square().sum(), net.weight)[0]
    torch.testing.assert_close(found, step(net, net, x)[0])
    run = reroll.compile(net, lowering="eager", remote="disk", **PLANS[plan])
    torch.testing.assert_close(step(run, net, longer), step(net, net, longer))


@pytest.mark.parametrize("plan", PLANS)
def test_without_descriptors_the_limit_is_named_and_the_next_step_is_right(plan: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(STEPS, 3, 4, dtype=torch.float64)
    run = reroll.compile(net, lowering="eager", remote="disk", spill_folder=tmp_path, **PLANS[plan])
    with no_descriptors(), pytest.raises(reroll.StorageError, match=r"Too many open files\. .*ulimit -n"):
        step(run, net, x)
    expected = step(net, net, x)
    torch.testing.assert_close(step(run, net, x), expected)
    with no_descriptors():
        torch.testing.assert_close(step(run, net, x), expected)


def test_a_table_of_mounts_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    with no_descriptors():
        assert filesystem(tmp_path) == "unknown"
    assert filesystem(tmp_path) != "unknown"


def test_a_place_with_blanks_and_other_letters_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, place = tmp_path / "mounts", tmp_path / "a b\té"
    place.mkdir()
    line = str(place).replace(" ", "\\040").replace("\t", "\\011")
    mounts.write_bytes(os.fsencode(f"disk / ext4 rw 0 0\ndisk {line} xfs rw 0 0\nd\udcff /x tmpfs rw 0 0\n"))
    monkeypatch.setattr("reroll.backends.tiers.spill_file._MOUNTS", mounts)
    assert (filesystem(place), filesystem(tmp_path)) == ("xfs", "ext4")
