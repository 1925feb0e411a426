"""Bytes, CPU seconds and gradient errors of training steps."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import reroll
from reroll.backends.measure.measure import Measurement

try:
    from reroll.backends.construct.stages.takeover import aside as aside  # for others, too
except ImportError:  # of an earlier version (versions.py)
    aside = nullcontext  # type: ignore[assignment]

Step = Callable[[], float | None]
"""A training step. It gives its own CPU seconds if it ran in another process."""


def training_step(model: Callable[[Tensor], Tensor], network: nn.Module, x: Tensor) -> Step:
    """One forward and backward into fresh gradients."""

    def step() -> None:
        network.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def gradients(step: Step, network: nn.Module) -> list[Tensor]:
    """The gradients of the parameters after one step."""
    step()
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]


def relative_error(found: list[Tensor], expected: list[Tensor], rounding: float | None = None) -> float:
    """The largest difference of any gradient, relative to the largest entry of the same gradient.

    rounding: gradients whose largest entry is not above this part of the largest of all are left out, as rounding.
    """
    pairs = list(zip(found, expected, strict=True))
    if rounding is not None:
        least = rounding * max(float(each.abs().max()) for each in expected)
        pairs = [pair for pair in pairs if float(pair[1].abs().max()) > least]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(os.times()[:4])


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Variables of a process whose caches, inductor's and reroll's, are empty at first, and gone afterwards.

    Torch keeps the header that it precompiles in the system's temporary folder."""
    with tempfile.TemporaryDirectory(prefix="reroll-bench-") as folder:
        yield dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "REROLL_CACHE_DIR", "TMPDIR"), folder)


def alone(command: list[str], limit: float, caches: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with one thread, in ``caches`` or empty ones. Raises TimeoutExpired after ``limit`` seconds."""
    if caches is None:
        with empty_caches() as empty:
            return alone(command, limit, empty)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | caches
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)


def told_apart(
    name: str, command: list[str], asked: str, *, threads: str | None = "1", enter: Callable[[], None] | None = None
) -> tuple[Any, dict[str, Any]]:
    """What a process with caches of its own prints last, as JSON, and where, when and of which commit that was, with
    the load of the machine before and after.

    ``asked``: the command that a user would give for it. ``threads``: as many as OpenMP may use, or as it likes.
    ``enter``: called in the process before it begins. Raises RuntimeError, with what was printed, where it fails.
    """
    with empty_caches() as caches:
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | caches
        environment |= {"OMP_NUM_THREADS": threads} if threads else {}
        before = os.getloadavg()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, preexec_fn=enter)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), {**machine(asked), "load_average": [before, os.getloadavg()]}


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


def keep_pages() -> None:
    """Let the C library of Linux keep memory that is freed, for the rest of the process.

    What takes turns with calls of other sizes would else pay for pages that come and go, which costs a small product
    more than its arithmetic does.
    """
    trim_threshold, mmap_threshold = -1, -3  # of glibc's malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 25)


def cost_of(step: Callable[[], object], exclude: Iterable[nn.Module | Tensor]) -> Measurement:
    """What ``reroll.measure`` says of a step in which none of reroll's programs is proved or looked at again."""
    with aside():
        return reroll.measure(step, exclude)


def interleaved(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step, ``rounds`` times in turn; all threads of the process count. None of reroll's programs
    is proved or looked at again meanwhile, as that becomes ever more seldom."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with aside():
        for name, step in list(steps.items()) * rounds:
            begin = time.process_time()
            told = step()
            seconds[name].append(time.process_time() - begin if told is None else told)
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


def side_by_side(
    runs: Mapping[str, Step], networks: Mapping[str, nn.Module], base: str, rounds: int, core: int | None
) -> dict[str, dict[str, Any]]:
    """Forward and backward in several ways, each with a network of its own: the ``error`` of its gradients against
    those of ``base``, the local ``peak`` in bytes, and the ``time`` of ways in turns."""

    def step(way: str) -> Step:
        def run() -> None:
            networks[way].zero_grad(set_to_none=True)
            runs[way]()

        return run

    steps = {way: step(way) for way in runs}
    with pinned(core):
        keep_pages()
        found = {way: gradients(each, networks[way]) for way, each in steps.items()}
        errors = {way: relative_error(each, found[base]) for way, each in found.items()}
        peaks = {way: cost_of(each, [networks[way]]).local_peak for way, each in steps.items()}
        times = summary(interleaved(steps, rounds), base)
    return {way: {"error": errors[way], "peak": peaks[way], "time": times[way]} for way in runs}


def machine(command: str) -> dict[str, Any]:
    """Where, when and of which commit this is measured."""
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    git, folder = shutil.which("git"), Path(__file__).resolve().parent
    asked = [git or "", "rev-parse", "--short", "HEAD"]
    told = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False) if git else None
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": platform.node(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": told.stdout.strip() if told else "",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def resident_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process grows at most during a call (Linux). Memory of Python's counts too.

    For steps so long that the profiler of ``reroll.measure``, which keeps every event, does not fit into memory.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024
