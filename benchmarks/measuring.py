"""Bytes, CPU seconds and gradient errors of training steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], None]
MIB = 2**20


def training_step(model: Callable[[Tensor], Tensor], network: nn.Module, x: Tensor) -> Step:
    """One forward and backward into gradients that exist already."""
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        model(x).square().mean().backward()

    return step


def gradients(step: Step, network: nn.Module) -> list[Tensor]:
    """The gradients of the parameters after one step."""
    step()
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest entry of the same gradient."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def local_peak(step: Step) -> int:
    """Most bytes held above what was held before the call: the allocator's events, of this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """One thread of torch on one core. None: any core."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, before if core is None else {core})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def interleaved(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step, ``rounds`` times in turn; all threads of the process count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            seconds[name].append(time.process_time() - begin)
    return seconds


def summary(seconds: Mapping[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Least and median seconds, and both relative to those of ``base``."""
    least = {name: min(each) for name, each in seconds.items()}
    median = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        name: {
            "least_s": least[name],
            "median_s": median[name],
            "least_ratio": least[name] / least[base],
            "median_ratio": median[name] / median[base],
        }
        for name in seconds
    }
