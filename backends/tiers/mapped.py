"""Sequences in files that are mapped into memory: what was cut off a file since cannot be read.

The system ends a process that reads behind the end of a mapped file, without a word. So before a loop is played, the
length of the file is compared with what the loop will read. Only Linux says which file lies at an address.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from reroll.errors import StorageError

LEAST = 2**24  # bytes: what is smaller is not looked at
_MAPS = Path("/proc/self/maps")


class Mapped(NamedTuple):
    """A file, by its path and its number, and the bytes that it must have."""

    path: Path
    inode: int
    nbytes: int

    @property
    def found(self) -> int | None:
        """The bytes that it has. None where another file, or none, has its path now: the mapped one lives on."""
        try:
            now = self.path.stat()
        except OSError:
            return None
        return now.st_size if now.st_ino == self.inode else None


def forbid_cut_files(sequences: Iterable[Tensor], where: str) -> None:
    """Raise StorageError for a sequence in a file that was cut short since it was mapped."""
    for sequence in sequences:
        if sequence.device.type != "cpu" or sequence.nbytes < LEAST:
            continue
        behind = sum((size - 1) * stride for size, stride in zip(sequence.shape, sequence.stride(), strict=True))
        last = sequence.data_ptr() + (behind + 1) * sequence.itemsize - 1
        if not _is_cut(_known(last, sequence.nbytes)):
            continue
        mapped = _mapped(last)  # what is known may be of what lay there before
        if mapped is not None and _is_cut(mapped):
            raise StorageError(
                f"The loop at {where} reads a sequence in the file {mapped.path}, of which it needs {mapped.nbytes:,} "
                f"bytes. The file has {mapped.found:,} now: it was cut after it was mapped. Write it again, and map it "
                "anew."
            )


def _is_cut(mapped: Mapped | None) -> bool:
    found = mapped.found if mapped else None
    return mapped is not None and found is not None and found < mapped.nbytes


@lru_cache(256)
def _known(last: int, _nbytes: int) -> Mapped | None:
    return _mapped(last)


def _mapped(address: int) -> Mapped | None:
    """The file at an address, which must reach up to it."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        area, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in area.split("-"))
        if start <= address < stop:
            there = bool(path) and path[0].startswith("/")
            return Mapped(Path(path[0]), int(inode), int(offset, 16) + address - start + 1) if there else None
    return None
