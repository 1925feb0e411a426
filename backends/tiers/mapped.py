"""Sequences in files that are mapped into memory: what was cut off a file since cannot be read.

The system ends a process that reads behind the end of a mapped file, without a word. So before a loop is played, the
length of the file is compared with what the loop will read. Only Linux says which file lies at an address.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from reroll.errors import StorageError

LEAST = 2**26  # bytes from the first to the last: what is smaller is not looked at, which takes about a millisecond
_MAPS = Path("/proc/self/maps")


class Mapped(NamedTuple):
    """A file, by its path and its number, and the bytes that it must have."""

    path: Path
    inode: int
    nbytes: int

    @property
    def cut(self) -> int | None:
        """The bytes that it has, if these are too few. None where another file, or none, has its path now: the mapped
        one lives on. What is no file of a size, such as ``/dev/zero``, cannot be cut."""
        try:
            now = self.path.stat()
        except OSError:
            return None
        is_it = now.st_ino == self.inode and stat.S_ISREG(now.st_mode)
        return now.st_size if is_it and now.st_size < self.nbytes else None


def forbid_cut_files(sequences: Iterable[Tensor], where: str) -> None:
    """Raise StorageError for a sequence in a file that was cut short since it was mapped."""
    ends = [_ends(each) for each in sequences if each.device.type == "cpu" and each.numel()]
    large = [last for first, last in ends if last - first >= LEAST - 1]
    for mapped in _mapped(large) if large else ():
        if (found := mapped.cut) is not None:
            raise StorageError(
                f"The loop at {where} reads a sequence in the file {mapped.path}, of which it needs {mapped.nbytes:,} "
                f"bytes. The file has {found:,} now: it was cut after it was mapped. Write it again, and map it anew."
            )


def _ends(sequence: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the last one."""
    behind = sum((size - 1) * stride for size, stride in zip(sequence.shape, sequence.stride(), strict=True))
    first = sequence.data_ptr()
    return first, first + (behind + 1) * sequence.itemsize - 1


def _mapped(addresses: Iterable[int]) -> Iterable[Mapped]:
    """The files at these addresses, each of which must reach up to one."""
    try:
        lines = os.fsdecode(_MAPS.read_bytes()).split("\n")
    except OSError:
        return
    for line in filter(None, lines):
        area, _, offset, _, inode, *path = line.split(maxsplit=5)
        if not path or not path[0].startswith("/"):
            continue
        start, stop = (int(end, 16) for end in area.split("-"))
        for address in addresses:
            if start <= address < stop:  # a new line in a name is written as its number
                yield Mapped(Path(path[0].replace("\\012", "\n")), int(inode), int(offset, 16) + address - start + 1)
