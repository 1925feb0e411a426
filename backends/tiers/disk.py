"""A file as a tier. One nameless file per tier, one thread that writes and one that reads.

The file has no name from the start (O_TMPFILE, or unlinked at once), so the system frees it however the process ends; a
folder that vanishes does no harm. Freed extents are reused, and the file is cut to nothing whenever it holds no block.
Every block has a CRC-32 of its bytes, checked at each read before anyone sees a value.

Memory: at most ``staging`` blocks wait to be written; ``write`` waits beyond that. Tensors are allocated and freed by
the caller's threads alone, so that a profiler of that thread sees every byte: a payload lives until the first call of
the tier after it was written. Bytes go between file and tensor without another copy; those of a device that works in
the background go through pinned memory, beside its work (``Transfers``), and the tier's threads wait for the copies.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
import weakref
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reroll.backends.tiers.device import background_of
from reroll.backends.tiers.extents import Extents
from reroll.backends.tiers.tier import STAGING, Traffic, payloads, with_payloads, with_room, without_payload
from reroll.backends.tiers.transfers import Landing, Parked, transfers_of
from reroll.errors import OptionError, RerollWarning, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reroll.backends.codecs.codec import Encoded

__all__ = ["DiskBlock", "DiskTier", "filesystem"]

IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(slots=True, eq=False)
class _Stored:
    """One block's place in the file, and its values until they are there."""

    file: SpillFile
    extents: Extents
    start: int
    nbytes: int
    values: tuple[Encoded, ...]
    parked: Parked | None  # what their payloads are part of, if they came from a device
    dropped: bool = False
    written: Future[int] = field(default_factory=Future)  # of the CRC-32

    def is_gone(self) -> bool:
        """Whether nobody wants it any more, which may be so at any moment."""
        return self.dropped


@dataclass(slots=True, eq=False)
class _Reading:
    """A read under way. The thread refers to the room only by this, so that its last owner is the caller.

    ``landing``: by which payloads of a device get there from the room, which is pinned then.
    """

    room: list[Encoded]
    landing: Landing | None
    done: Future[None] = field(default_factory=Future)


def _views(values: Sequence[Encoded]) -> Iterator[memoryview]:
    """The memory of the payloads."""
    for value in values:
        for part in value.payload:
            if part.numel():
                yield part.view(torch.uint8).numpy().data


def _write(stored: _Stored) -> int:
    """Runs in the writing thread."""
    if stored.dropped:
        return 0
    if stored.parked:
        stored.parked.written.synchronize()
    return stored.file.write(stored.start, _views(stored.values))


def _read(stored: _Stored, reading: _Reading) -> None:
    """Runs in the reading thread; waits for the write. What was dropped meanwhile may be anything."""
    expected = stored.written.result()
    if stored.is_gone():
        return
    if reading.landing:
        reading.landing.ready()
    try:
        found = stored.file.read(stored.start, _views(reading.room))
    except StorageError:
        if stored.is_gone():  # and the file cut behind it
            return
        raise
    if found != expected and not stored.is_gone():
        raise StorageError(
            f"The spill file in {stored.file.folder} gave back other bytes than were written "
            f"({stored.nbytes} bytes at offset {stored.start}, CRC-32 differs). Check the disk; use another folder."
        )
    if reading.landing:
        reading.landing.send()


def _free(stored: _Stored) -> None:
    """Give the place back once nothing is being written to it."""
    stored.dropped = True
    stored.written.add_done_callback(lambda _: stored.extents.free(stored.start, stored.nbytes))


class DiskBlock:
    """Values in the tier's file."""

    def __init__(self, tier: DiskTier, stored: _Stored, values: tuple[Encoded, ...]) -> None:
        self._tier = tier
        self._stored = stored
        self._values = values  # without their payloads
        self._reading: _Reading | None = None
        self._free = weakref.finalize(self, _free, stored)
        self._free.atexit = False  # type: ignore[misc]  # typeshed lacks the slot

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self._stored.nbytes

    def prefetch(self) -> None:
        """Start to read in the background, into memory that is allocated now."""
        if self._stored.dropped:
            raise StorageError("A block on disk was read after it was dropped. Keep it until its last read.")
        if self._reading is None:
            self._reading = self._tier.start_read(self._stored, self._room())

    def read(self) -> list[Encoded]:
        """Wait for the values and check them. Reading again reads the file again."""
        self.prefetch()
        reading, self._reading = self._reading, None
        if reading is None:
            raise AssertionError("prefetch starts a read")
        reading.done.result()
        room, reading.room = reading.room, []
        if reading.landing is None:
            return room
        return with_payloads(room, reading.landing.arrival.take(), background_of(room))

    def _room(self) -> _Reading:
        device = background_of(self._values)
        if device is None:
            return _Reading(with_room(self._values), None)
        landing = transfers_of(device).land(payloads(self._values, device))
        return _Reading(with_room(with_payloads(self._values, landing.room.parts, device)), landing)

    def drop(self) -> None:
        """Give the space in the file back."""
        self._reading = None
        self._free()


class DiskTier:
    """Blocks in one nameless file in ``folder`` (by default the system's temporary folder)."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, staging: int = STAGING) -> None:
        if staging < 1:
            raise OptionError(f"A disk tier with staging={staging} could never write. Give at least 1 block.")
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.traffic = Traffic()
        self._device: torch.device | None = None
        self._file = SpillFile(self.folder)
        self._extents = Extents(self._file.cut)
        self._staging = staging
        self._staged: deque[_Stored] = deque()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "reroll-disk-write")
        self._reader = ThreadPoolExecutor(1, "reroll-disk-read")
        kind = filesystem(self.folder)
        if kind in IN_MEMORY:
            text = (
                f"The spill folder {self.folder} is a {kind}, which is memory, not a disk. Choose a folder on a disk."
            )
            warnings.warn(text, RerollWarning, stacklevel=2)

    def write(self, values: Sequence[Encoded]) -> DiskBlock:
        """Write in the background; wait first while ``staging`` blocks are still to be written."""
        self._device = device = background_of(values)
        parked = transfers_of(device).park(payloads(values, device)) if device else None
        kept = with_payloads(values, parked.parts, device) if parked else list(values)
        kept = with_payloads(kept, (part.cpu() for part in payloads(kept)))
        nbytes = sum(value.nbytes for value in values)
        with self._lock:
            self._settle(self._staging - 1)
            stored = _Stored(self._file, self._extents, self._extents.take(nbytes), nbytes, tuple(kept), parked)
            stored.written = self._writer.submit(_write, stored)
            self._staged.append(stored)
        self.traffic.writes += 1
        self.traffic.bytes_written += nbytes
        return DiskBlock(self, stored, without_payload(values))

    def start_read(self, stored: _Stored, reading: _Reading) -> _Reading:
        """Read in the background. Raises what went wrong with earlier writes."""
        self.settle()
        self.traffic.reads += 1
        self.traffic.bytes_read += stored.nbytes
        reading.done = self._reader.submit(_read, stored, reading)
        return reading

    def settle(self) -> None:
        """Wait for the writes of the computer's own memory; let the present work of a device wait for its copies."""
        with self._lock:
            self._settle(self._staging if self._device else 0)
        if self._device:
            transfers_of(self._device).settle()

    def drain(self) -> None:
        """Wait for all writes."""
        with self._lock:
            self._settle(0)

    def _settle(self, limit: int) -> None:
        """Forget the payloads of blocks that are written; wait until at most ``limit`` are not."""
        while self._staged and (len(self._staged) > limit or self._staged[0].written.done()):
            error = self._staged[0].written.exception()
            written = self._staged.popleft()
            written.values, written.parked = (), None
            if error is not None:
                raise error


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
