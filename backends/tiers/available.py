"""How much memory and disk a process may still take, on the computer and on a GPU."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from reroll.errors import StorageError

_ROOT = Path("/")
_GROUPS = Path("sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_disk(folder: str | os.PathLike[str]) -> int:
    """Bytes free in the file system of a folder. Raises StorageError where it is not there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(
            f"The spill folder {os.fspath(folder)} cannot be read: {error.strerror}. Choose one that exists."
        ) from error


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, those that torch's own allocator holds and does not use included.

    None where no system says it.
    """
    if device.type != "cuda":
        return free_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def total_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated on a device by a process that is alone there. None where no system says it."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes of RAM that this process may still take, pages that only cache files included.

    The least of what the system says (``MemAvailable``), of what the limits of all control groups around the process
    leave, versions 1 and 2, and of the process's own limit of addresses (``ulimit -v``). None where no system says it.
    ``root`` is where ``/proc`` and ``/sys`` are.
    """
    found = [*_limits(root, "MemAvailable"), *_addresses(root)]
    found += [left for group in _groups(root) if (left := _left(group)) is not None]
    return max(0, min(found)) if found else None


def total_memory(root: Path = _ROOT) -> int | None:
    """Bytes of RAM that this process could take if it were alone: of the machine, and of the limits around the process.

    None where no system says it. ``root`` is where ``/proc`` and ``/sys`` are.
    """
    limits = (_text(group / most).strip() for group in _groups(root) for most, _, _ in _LIMITS)
    found = [*_limits(root, "MemTotal"), *(int(limit) for limit in limits if limit.isdigit())]
    return min(found, default=None)


def _limits(root: Path, what: str) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, amount = line.partition(":")
        if name == what:
            yield int(amount.split()[0]) * 1024


def _addresses(root: Path) -> Iterator[int]:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    for pages in _text(root / "proc/self/statm").split()[:1]:
        if most != resource.RLIM_INFINITY:
            yield most - int(pages) * resource.getpagesize()


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the memory groups of this process, innermost first; those outside of a container are missing."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, place = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            base = root / _GROUPS / ("" if number == "0" else "memory")
            inner = base / place.strip("/")
            yield from (each for each in (inner, *inner.parents) if each.is_relative_to(base))


def _left(group: Path) -> int | None:
    """What the limit of a group leaves; None without one. Inactive file pages are given back when memory is short."""
    for most, held, cached in _LIMITS:
        limit, usage = _text(group / most).strip(), _text(group / held).strip()
        if limit.isdigit() and usage.isdigit():
            pages = [line.split()[1] for line in _text(group / "memory.stat").splitlines() if line.startswith(cached)]
            return int(limit) - int(usage) + sum(map(int, pages[:1]))
    return None


def _text(path: Path) -> str:
    """The text of a file of the system; empty where there is none, or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
