"""A nameless file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from reroll.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def filesystem(folder: str | os.PathLike[str]) -> str:
    """The type of the file system under a folder, such as "ext4" or "tmpfs"; "unknown" where no system says it."""
    path = Path(folder).resolve()
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    kinds: dict[Path, str] = {}
    for line in mounts.read_text().splitlines():
        _, place, kind, *_ = line.split(" ")
        kinds[Path(place.encode().decode("unicode_escape"))] = kind  # the last mount on a place is the visible one
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), "unknown")


class SpillFile:
    """A nameless file, closed when nobody refers to it. Every failure is a StorageError that says where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = os.getpid()
        try:
            self._file = tempfile.TemporaryFile(prefix="reroll-", dir=folder, buffering=0)  # noqa: SIM115  # closed below
        except OSError as error:
            raise StorageError(
                f"No spill file can be made in {folder}: {error.strerror}. Choose a folder that exists and is writable."
            ) from error
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

    def cut(self) -> None:
        """Give all bytes back to the file system. A forked process shares the file, and leaves it alone."""
        if os.getpid() == self._process:
            with contextlib.suppress(OSError, ValueError):  # nothing is lost if the bytes stay until the file is closed
                os.ftruncate(self._file.fileno(), 0)

    def _failure(self, done: str, error: OSError | ValueError) -> StorageError:
        reason = getattr(error, "strerror", None) or str(error)
        return StorageError(
            f"The spill file in {self.folder} ({filesystem(self.folder)}) cannot be {done}: {reason}. "
            f"Free space there or choose another folder, then repeat the training step."
        )
