"""What moves to the disk leaves the process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from reroll.backends.tiers import heap

STATUS = Path("/proc/self/status")

PROGRAM = """
from pathlib import Path
import torch, reroll
from reroll.backends.tiers import heap
from torch import nn

heap._SHARE = float("inf")  # however slow the machine is while this runs

class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(1024))
    def forward(self, x_TBI):
        h_BH = x_TBI.new_zeros(512, 1024)
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.decay * h_BH + x_TBI[t])
        return h_BH

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if "RssAnon" in line)

torch.set_num_threads(1)
model, x_TBI = Leaky(), torch.randn(300, 512, 1)
options = {"schedule": "remote", "remote": "disk", "segment": 1, "chunk": 1, "codec": "none"}
run = reroll.compile(model, lowering="eager", **options)
run(x_TBI[:20]).sum().backward()
before = held()
run(x_TBI).sum().backward()
print(held() - before)
"""


@pytest.mark.skipif(not STATUS.exists() or "RssAnon" not in STATUS.read_text(), reason="only Linux tells it")
def test_the_process_does_not_grow_by_what_it_moves_to_the_disk() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    written = 300 * 512 * 1024 * 4
    assert int(done.stdout.splitlines()[-1]) < written / 2


@pytest.mark.parametrize(("trim", "times"), [("missing", 0), ("quick", 7), ("slow", 4)])
def test_pages_are_given_back_now_and_then(trim: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than with glibc nothing happens; where it takes long it is done less often: a call of ten seconds here,
    of 200 seconds in which memory was freed."""
    clock, trimmed = [1_000.0], list[float]()

    def slow(_: int) -> None:
        trimmed.append(clock[0])
        clock[0] += 10.0 if trim == "slow" else 1e-3

    monkeypatch.setattr(heap, "_trim", lambda: None if trim == "missing" else slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for name, value in (("nbytes", 0), ("ended", 0.0), ("took", 0.0)):
        monkeypatch.setattr(heap._Freed, name, value)
    for _ in range(30):
        heap.give_back(1 << 24)
        clock[0] += 30.0
    assert len(trimmed) == times
    if trim == "slow":
        assert trimmed[1] - trimmed[0] >= 200.0
