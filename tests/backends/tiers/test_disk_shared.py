"""The disk tier shares threads and files, survives a fork, and forgets the errors of a step that is over."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.codecs.codec import decode, encode
from reroll.backends.tiers.disk import DiskTier
from reroll.errors import StorageError

DEADLOCK = 120  # seconds: only a deadlock takes so long

FORK_A_TIER = """
import os, sys, threading
import torch
from reroll.backends.codecs.codec import decode, encode
from reroll.backends.tiers.disk import DiskTier
from reroll.errors import StorageError

tier = DiskTier(sys.argv[1])
old = tier.write([encode(torch.ones(1000), "raw")])
tier.drain()
inside, write, go_on = threading.Event(), os.pwrite, threading.Event()

def held(*args):
    inside.set()
    go_on.wait()
    return write(*args)

os.pwrite = held
waiting = [tier.write([encode(torch.full((1000,), 2.0), "raw")]) for _ in range(2)]
waiter = threading.Thread(target=tier.drain)  # it holds the lock of the tier, and waits for ever
waiter.start()
inside.wait()
child = os.fork()
if child == 0:
    os.pwrite = write
    block = tier.write([encode(torch.full((1000,), 3.0), "raw")])
    tier.drain()
    right = decode(block.read()[0]).eq(3).all().item()
    for block in (old, waiting[0]):
        try:
            block.read()
        except StorageError as error:
            right = right and "the process that wrote it" in str(error) and "spawn" in str(error)
        else:
            right = False
    del block, old, waiting
    os._exit(0 if right else 1)
_, status = os.waitpid(child, 0)
go_on.set()
waiter.join()
right = decode(old.read()[0]).eq(1).all().item() and decode(waiting[1].read()[0]).eq(2).all().item()
sys.exit(0 if right and status == 0 else 1)
"""

FORK_A_MODEL = """
import multiprocessing, sys
import torch
from torch import nn
import reroll

torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        h = torch.zeros(2, 5)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h @ self.w)
        return h.sum()

options = dict(schedule="double", chunk=4, slots=2, remote="disk", spill_folder=sys.argv[1], lowering="eager")
net, x = Net(), torch.randn(24, 2, 5)
rolled = reroll.compile(net, **options)

def step(model):
    net.zero_grad()
    model(x).backward()
    return net.w.grad.clone()

def child(queue):
    queue.put([step(rolled).tolist() for _ in range(2)])

plain, before = step(net), step(rolled)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    for each in (*map(torch.tensor, found), before, step(rolled)):
        torch.testing.assert_close(each, plain)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("code", [FORK_A_TIER, FORK_A_MODEL], ids=["tier", "model"])
def test_a_forked_process_begins_anew(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=DEADLOCK, check=False
    )
    assert done.returncode == 0, done.stderr


class Net(nn.Module):
    """A recurrence of its own for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, 5, dtype=x.dtype)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h @ self.w)
        return h.sum()


def disk(net: Net, folder: Path) -> Net:
    options: dict[str, Any] = {"schedule": "double", "chunk": 4, "slots": 2, "remote": "disk", "spill_folder": folder}
    rolled: Net = reroll.compile(net, lowering="eager", **options)
    return rolled


def trained(net: Net, model: Net, steps: int) -> Tensor:
    net.zero_grad()
    model(torch.ones(steps, 2, 5)).backward()
    assert net.w.grad is not None
    return net.w.grad


def test_lengths_share_threads_and_one_file(tmp_path: Path) -> None:
    net = Net()
    rolled = disk(net, tmp_path)
    trained(net, rolled, 20)

    def held() -> tuple[int, int]:
        names = [each.name for each in threading.enumerate() if each.name.startswith("reroll-disk")]
        descriptors = Path("/proc/self/fd")
        return len(names), len(list(descriptors.iterdir())) if descriptors.is_dir() else 0

    before = held()
    for steps in range(21, 33):
        trained(net, rolled, steps)
    assert held() == before
    assert before[0] == 2
    other = DiskTier(tmp_path)
    block = other.write([encode(torch.ones(3), "raw")])
    assert held() == before
    assert decode(block.read()[0]).tolist() == [1, 1, 1]


def test_a_step_after_a_full_disk_meets_no_old_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    rolled, write = disk(net, tmp_path), os.pwrite
    right = trained(net, rolled, 40).clone()
    kept: list[BaseException] = []
    for place in range(6):
        left = [place]

        def fills(fd: int, view: memoryview, at: int, left: list[int] = left) -> int:
            left[0] -= 1
            time.sleep(0.01)  # so that another block waits when this one fails
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, view, at)

        monkeypatch.setattr(os, "pwrite", fills)
        with pytest.raises(StorageError, match="No space left") as caught:
            trained(net, rolled, 40)
        kept.append(caught.value)  # with all that its frames refer to
        monkeypatch.undo()
        torch.testing.assert_close(trained(net, rolled, 40), right, rtol=0, atol=0)


def test_an_error_of_what_nobody_wants_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    block = tier.write([encode(torch.ones(3), "raw")])
    block._stored.written.exception()
    block.drop()
    tier.drain()
