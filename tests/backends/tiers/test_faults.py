"""Whatever fails, once, wherever carries are moved or a segment starts: an error or right gradients; then as if nothing
had been."""

from __future__ import annotations

import errno
import os
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
        return reroll.compile(net, time_dim=0, lowering="eager", **options)

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
