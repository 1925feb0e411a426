"""Measuring this machine: what its tiers move in a second, and how long callables take.

What calibrations found is kept on disk: one JSON file for each machine, version of torch and spill folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from reroll.backends.cache.folder import WRITABLE, ForeignError, cache_folder, read_own, write_own
from reroll.backends.codecs.codec import encode
from reroll.backends.tiers.spill_file import spill_folder
from reroll.backends.tiers.tier import TIERS, Tier
from reroll.errors import MachineError, OptionError, remedy, warn
from reroll.schedules.machine import REMOTE_TIERS, Machine, MachineTier

BLOCKS = (1 << 16, 1 << 19, 1 << 22)
"""Bytes of the blocks that are moved: small ones show the latency, large ones the bandwidth."""

_SECONDS = 0.08  # for each size and tier
_RUNS = 5, 200  # at least, at most


Origin = Mapping[str, str]
"""On what was measured: names and values, all text."""


def calibrate(force: bool = False, folder: str | os.PathLike[str] | None = None) -> Machine:
    """The tiers of this machine: bandwidth, latency, and what is free now. Takes a second, the first time.

    Blocks go through the disk tier's own file in ``folder`` (by default the system's temporary folder), as they do in
    training: into the system's cache of files, without waiting for the device; and through the host tier, on CUDA by
    pinned copies. What was measured is kept for this machine, version of torch and folder (``REROLL_CACHE_DIR``, else
    the user's cache folder) and taken from there, except with ``force``. Capacities are those of the moment.
    Raises OptionError for a folder that is none, StorageError for one that cannot be written.
    """
    folder = spill_folder(folder).resolve()
    if not folder.is_dir():
        raise OptionError(f"{folder} is not a folder in which a disk tier could be measured. Create it first.")
    origin = _origin(folder)
    machine = None if force else recall(origin)
    if machine is None:
        with _one_thread():
            machine = _measured(folder)
        remember(origin, machine)
    free = {name: TIERS.find(name).free(folder) for name in machine.tiers}
    least = {name: None if room is None else max(room, 1) for name, room in free.items()}  # no tier holds nothing
    tiers = {name: replace(tier, capacity=least[name]) for name, tier in machine.tiers.items()}
    return replace(machine, tiers=tiers)


def seconds_of(fn: Callable[[], object], most_seconds: float = 0.2) -> float:
    """Wall seconds of one call: the least of calls for about ``most_seconds`` at most, one at least, after a warm-up.

    The least, because what others on the machine take is added to the rest. Work left to a CUDA device counts.
    """
    fn()
    _settle()
    taken: list[float] = []
    start = time.perf_counter()
    while not taken or (len(taken) < _RUNS[1] and time.perf_counter() - start + taken[-1] < most_seconds):
        before = time.perf_counter()
        fn()
        _settle()
        taken.append(time.perf_counter() - before)
    return min(taken)


def fit(nbytes: Sequence[int], writes: Sequence[float], reads: Sequence[float]) -> tuple[float, float, float]:
    """Latency in seconds, and bytes written and read in a second, of blocks of some sizes and their seconds.

    Least squares of the relative errors of ``latency + nbytes / bandwidth``, with one latency for both ways; where
    that would be negative, without one.
    """
    sizes, none = np.asarray(nbytes, dtype=np.float64), np.zeros(len(nbytes))
    seconds = np.concatenate([writes, reads])
    rows = np.stack([np.ones(2 * len(nbytes)), np.concatenate([sizes, none]), np.concatenate([none, sizes])], axis=1)
    rows /= seconds[:, None]
    target = np.ones(len(seconds))
    latency, *slopes = np.linalg.lstsq(rows, target)[0].tolist()
    if latency < 0:
        latency, slopes = 0.0, np.linalg.lstsq(rows[:, 1:], target)[0].tolist()
    largest = int(sizes.argmax())
    for way, times in enumerate((writes, reads)):
        if slopes[way] <= 0:  # the seconds do not grow with the size: all that is known is the largest block
            slopes[way] = times[largest] / nbytes[largest]
    return latency, 1 / slopes[0], 1 / slopes[1]


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a machine that has other work, several threads of one copy wait for each other, for milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measured(folder: Path) -> Machine:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds = {name: _speeds(name, TIERS.find(name).make(folder), device) for name in REMOTE_TIERS.names()}
    return Machine(platform.node(), speeds, "measured")


def _speeds(name: str, tier: Tier, device: torch.device) -> MachineTier:
    moves = [_moves(tier, nbytes, device) for nbytes in BLOCKS]
    latency, write, read = fit(BLOCKS, *zip(*moves, strict=True))
    return MachineTier(name, write, read, latency)


def _moves(tier: Tier, nbytes: int, device: torch.device) -> tuple[float, float]:
    """The least seconds of writing a block and of reading it back, until the device has it."""
    numbers = torch.Generator("cpu").manual_seed(0)
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=numbers, device="cpu")
    values = (encode(noise.to(device), "raw"),)
    writes, reads = list[float](), list[float]()
    start = time.perf_counter()
    while len(writes) <= _RUNS[0] or (len(writes) < _RUNS[1] and time.perf_counter() - start < _SECONDS):
        _settle()
        before = time.perf_counter()
        block = tier.write(values)
        tier.drain()
        written = time.perf_counter()
        back = [part.to(device) for value in block.read() for part in value.payload]
        _settle()
        reads.append(time.perf_counter() - written)
        writes.append(written - before)
        block.drop()
        del back
    return min(writes[1:]), min(reads[1:])


def _settle() -> None:
    """Wait for what was left to a CUDA device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _origin(folder: Path) -> Origin:
    """On what is measured."""
    return {
        "machine": platform.node(),
        "cpu": _cpu(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "folder": str(folder),
        "tiers": ", ".join(REMOTE_TIERS.names()),
    }


def _cpu() -> str:
    """The model of the CPU, or at least its kind."""
    lines = list[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def path_of(origin: Origin) -> Path:
    """The file of a calibration."""
    digest = hashlib.sha256(json.dumps(dict(origin), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json"


def recall(origin: Origin) -> Machine | None:
    """The machine that was measured on ``origin``; None if there is none.

    A file that is broken, or speaks of another origin, is ignored with a RerollWarning.
    """
    path = path_of(origin)
    try:
        read = json.loads(read_own(path.name))
    except ForeignError as error:
        _ignore(path, str(error.strerror))
        return None
    except OSError:
        return None
    except ValueError as error:
        _ignore(path, f"is broken ({error})")
        return None
    try:
        machine = Machine.from_json(json.dumps(read["machine"]))
        found = dict(read["measured_on"])
    except (ValueError, TypeError, KeyError, MachineError) as error:
        _ignore(path, f"is broken ({type(error).__name__}: {error})")
        return None
    other = [f"{name} {found.get(name)!r}, not {value!r}" for name, value in origin.items() if found.get(name) != value]
    if other:
        _ignore(path, f"was taken elsewhere ({'; '.join(other)})")
        return None
    return machine


def remember(origin: Origin, machine: Machine) -> None:
    """Write the file, whole or not at all, also where several processes do. A RerollWarning where it cannot be."""
    path = path_of(origin)
    text = json.dumps({"measured_on": dict(origin), "machine": json.loads(machine.to_json())}, indent=2) + "\n"
    try:
        write_own(text.encode(), path.name)
    except OSError as error:
        warn(
            f"The calibration cannot be kept in {path.parent} ({error.strerror}), so it is measured again in every "
            f"process. {remedy(error, WRITABLE)}",
        )


def _ignore(path: Path, why: str) -> None:
    warn(
        f"The calibration in {path} {why}; the machine is measured again.",
    )
