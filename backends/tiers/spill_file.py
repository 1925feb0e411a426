"""A nameless file in a folder, and which bytes of it are free: where blocks are spilled to.

It has no name from the start (O_TMPFILE, or unlinked at once), so the system frees it however the process ends; a
folder that vanishes does no harm. Freed extents are reused, and the file is cut to nothing whenever it holds no block.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reroll.backends.tiers.extents import Extents
from reroll.errors import StorageError, remedy

_MOUNTS = Path("/proc/self/mounts")
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # a blank or another byte in the name of a place


def spill_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder, by default the system's temporary one. Raises StorageError where there is no such."""
    try:
        return Path(tempfile.gettempdir() if folder is None else folder)
    except OSError as error:
        raise StorageError(
            f"The disk tier finds no temporary folder to write to ({error.strerror}). Name one by spill_folder=... or "
            "by the environment variable TMPDIR."
        ) from error


def filesystem(folder: str | os.PathLike[str]) -> str:
    """The type of the file system under a folder, such as "ext4" or "tmpfs"; "unknown" where no system says it."""
    try:
        path, lines = Path(folder).resolve(), _MOUNTS.read_bytes().splitlines()
    except OSError:  # what kind it is only makes messages better
        return "unknown"
    kinds: dict[Path, str] = {}
    for _, place, kind, *_ in (line.split(b" ") for line in lines):
        named = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), place)
        kinds[Path(os.fsdecode(named))] = os.fsdecode(kind)  # the last mount on a place is the visible one
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), "unknown")


def _no_file(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"No spill file can be made in {folder}: {error.strerror}. "
        f"{remedy(error, 'Choose a folder that exists and is writable, then repeat the training step.')}"
    )


class SpillFile:
    """A nameless file, closed when nobody refers to it. Every failure is a StorageError that says where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = os.getpid()
        try:
            self._file = tempfile.TemporaryFile(prefix="reroll-", dir=folder, buffering=0)  # noqa: SIM115  # closed below
        except OSError as error:
            raise _no_file(folder, error) from error
        weakref.finalize(self, self._file.close)

    def write(self, start: int, views: Iterator[memoryview]) -> int:
        """Write the views one after another from ``start`` on. Gives their CRC-32."""
        crc = 0
        try:
            for view in views:
                crc, done = zlib.crc32(view, crc), 0
                while done < len(view):
                    done += os.pwrite(self._file.fileno(), view[done:], start + done)
                start += done
        except (OSError, ValueError) as error:  # a closed file is a ValueError
            raise self._failure("written", error) from error
        return crc

    def read(self, start: int, views: Iterator[memoryview]) -> int:
        """Fill the views with what was written from ``start`` on. Gives its CRC-32."""
        crc = 0
        try:
            for view in views:
                done = 0
                while done < len(view):
                    count = os.preadv(self._file.fileno(), [view[done:]], start + done)
                    if count == 0:
                        raise OSError(0, f"the file ends {len(view) - done} bytes too early")
                    done += count
                crc, start = zlib.crc32(view, crc), start + done
        except (OSError, ValueError) as error:
            raise self._failure("read", error) from error
        return crc

    def is_ours(self) -> bool:
        """Whether this process made it. A forked one shares it, and leaves it alone."""
        return os.getpid() == self._process

    def cut(self) -> None:
        """Give all bytes back to the file system."""
        if self.is_ours():
            with contextlib.suppress(OSError, ValueError):  # nothing is lost if the bytes stay until the file is closed
                os.ftruncate(self._file.fileno(), 0)

    def _failure(self, done: str, error: OSError | ValueError) -> StorageError:
        reason = getattr(error, "strerror", None) or str(error)
        return StorageError(
            f"The spill file in {self.folder} ({filesystem(self.folder)}) cannot be {done}: {reason}. "
            "Free space there or choose another folder, then repeat the training step."
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Place:
    """A file, and which bytes of it are free."""

    file: SpillFile
    extents: Extents


class Places:
    """The places that are in use, by folder."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without any."""
        self._known: weakref.WeakValueDictionary[tuple[int, int], Place] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def find(self, folder: Path) -> Place:
        """The place in a folder. Raises StorageError if no file can be made there."""
        with self._lock:
            try:
                status = folder.stat()
            except OSError as error:
                raise _no_file(folder, error) from error
            place = self._known.get((status.st_dev, status.st_ino))
            if place is None:
                file = SpillFile(folder)
                place = self._known[status.st_dev, status.st_ino] = Place(file, Extents(file.cut))
            return place


PLACES = Places()
