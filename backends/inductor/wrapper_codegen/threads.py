"""How many threads of torch are worth having: no more than there are cores.

More threads than cores wait for one another at the end of each small kernel: four on two cores make eager 1.5 to 8
times as slow (``benchmarks/threads.py``). So kernels are written for as many threads as there are cores, and
torch has no more of them while a loop runs.

Private torch API, tried on 2.11 and 2.13: ``_inductor.config`` (inductor's own number of threads).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernel_threads() -> int:
    """How many threads inductor's kernels are written for: torch's, but no more than there are cores. Inductor's own
    setting comes first."""
    asked: int = torch._inductor.config.cpp.threads
    return asked if asked > 0 else min(torch.get_num_threads(), cores())


@contextmanager
def no_more_threads_than_cores() -> Iterator[None]:
    """Inside, torch has at most as many threads as there are cores. What is set inside stays."""
    before, most = torch.get_num_threads(), cores()
    if before <= most:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        if torch.get_num_threads() == most:
            torch.set_num_threads(before)
