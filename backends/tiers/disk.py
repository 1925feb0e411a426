"""A file as a tier: one nameless file for each folder, and one thread that writes and one that reads for a process.

However many recurrences and lengths there are, they share these; what waits to be written, and what went wrong with it,
is each tier's own. Every block has a CRC-32 of its bytes, checked at each read before anyone sees a value.

A forked process has no threads, and a lock that was taken stays so for ever: there everything begins anew
(``_begin_anew``), with a file of its own. Blocks from before the fork stay those of the process that wrote them.

Memory: at most ``staging`` blocks of a tier wait to be written; ``write`` waits beyond that. Tensors are allocated and
freed by the caller's threads alone, so that a profiler of that thread sees every byte: a payload lives until the first
call of the tier after it was written. Bytes go between file and tensor without another copy; those of a device that
works in the background go through pinned memory, beside its work (``Transfers``), and the tier's threads wait for the
copies.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reroll.backends.tiers.available import free_disk
from reroll.backends.tiers.device import background_of
from reroll.backends.tiers.heap import give_back
from reroll.backends.tiers.spill_file import PLACES, Place, filesystem, spill_folder
from reroll.backends.tiers.tier import (
    STAGING,
    Traffic,
    payloads,
    register_tier,
    with_payloads,
    with_room,
    without_payload,
)
from reroll.backends.tiers.transfers import Landing, Parked, transfers_of
from reroll.errors import OptionError, StorageError, warn
from reroll.schedules.machine import REMOTE_TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reroll.backends.codecs.codec import Encoded

IN_MEMORY = ("tmpfs", "ramfs")


class _Threads:
    """The thread that writes and the one that reads, started when they are first needed."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """New ones."""
        self.writer = ThreadPoolExecutor(1, "reroll-disk-write")
        self.reader = ThreadPoolExecutor(1, "reroll-disk-read")


_THREADS = _Threads()


@dataclass(slots=True, eq=False)
class _Stored:
    """One block's place in the file, and its values until they are there."""

    place: Place
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
    return stored.place.file.write(stored.start, _views(stored.values))


def _read(stored: _Stored, reading: _Reading) -> None:
    """Runs in the reading thread; waits for the write. What was dropped meanwhile may be anything."""
    expected = stored.written.result()
    if stored.is_gone():
        return
    if reading.landing:
        reading.landing.ready()
    try:
        found = stored.place.file.read(stored.start, _views(reading.room))
    except StorageError:
        if stored.is_gone():  # and the file cut behind it
            return
        raise
    if found != expected and not stored.is_gone():
        raise StorageError(
            f"The spill file in {stored.place.file.folder} gave back other bytes than were written "
            f"({stored.nbytes} bytes at offset {stored.start}, CRC-32 differs). Check the disk; use another folder."
        )
    if reading.landing:
        reading.landing.send()


def _free(stored: _Stored) -> None:
    """Give the extent back once nothing is being written to it. What another process wrote is left to that one."""
    stored.dropped = True
    if stored.place.file.is_ours():
        stored.written.add_done_callback(lambda _: stored.place.extents.free(stored.start, stored.nbytes))


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
        if not self._stored.place.file.is_ours():
            raise StorageError(
                "A block on disk belongs to the process that wrote it, and this one was forked off since. Run the "
                "forward and the backward pass in one process, or start the other by 'spawn'."
            )
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
    """Blocks in a nameless file in ``folder`` (by default the system's temporary folder)."""

    _place: Place | None

    def __init__(self, folder: str | os.PathLike[str] | None = None, staging: int = STAGING) -> None:
        if staging < 1:
            raise OptionError(f"A disk tier with staging={staging} could never write. Give at least 1 block.")
        self.folder = spill_folder(folder)
        self.traffic = Traffic()
        self._device: torch.device | None = None
        self._staging = staging
        self.begin()
        self._place = PLACES.find(self.folder)
        kind = filesystem(self.folder)
        if kind in IN_MEMORY:
            text = (
                f"The spill folder {self.folder} is a {kind}, which is memory, not a disk. Choose a folder on a disk."
            )
            warn(text)
        _LIVING.add(self)

    def begin(self) -> None:
        """Wait for nothing, and have no file yet: what a tier of a forked process begins with."""
        self._place = None
        self._staged: deque[_Stored] = deque()
        self._lock = threading.Lock()

    def write(self, values: Sequence[Encoded]) -> DiskBlock:
        """Write in the background; wait first while ``staging`` blocks are still to be written."""
        self._device = device = background_of(values)
        parked = transfers_of(device).park(payloads(values, device)) if device else None
        kept = with_payloads(values, parked.parts, device) if parked else list(values)
        kept = with_payloads(kept, (part.cpu() for part in payloads(kept)))
        nbytes = sum(value.nbytes for value in values)
        with self._lock:
            self._settle(self._staging - 1)
            place = self._place = self._place or PLACES.find(self.folder)
            stored = _Stored(place, place.extents.take(nbytes), nbytes, tuple(kept), parked)
            stored.written = _THREADS.writer.submit(_write, stored)
            self._staged.append(stored)
        self.traffic.writes += 1
        self.traffic.bytes_written += nbytes
        return DiskBlock(self, stored, without_payload(values))

    def start_read(self, stored: _Stored, reading: _Reading) -> _Reading:
        """Read in the background. Raises what went wrong with earlier writes."""
        self.settle()
        if reading.landing is None:
            give_back(stored.nbytes)  # of what was read before
        self.traffic.reads += 1
        self.traffic.bytes_read += stored.nbytes
        reading.done = _THREADS.reader.submit(_read, stored, reading)
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
        """Forget the payloads of blocks that are written; wait until at most ``limit`` are not.

        Raises what went wrong with a block that somebody still wants, once: then none waits any more, so that the next
        training step does not meet errors of this one.
        """
        failed: BaseException | None = None
        while self._staged and (failed or len(self._staged) > limit or self._staged[0].written.done()):
            error = self._staged[0].written.exception()
            written = self._staged.popleft()
            if written.parked is None:  # else its payloads were pinned memory, which is kept
                give_back(written.nbytes)
            written.values, written.parked = (), None
            failed = failed or (None if written.is_gone() else error)
        if failed is not None:
            raise failed


_LIVING: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _begin_anew() -> None:
    """Runs in a forked process, which has one thread."""
    _THREADS.start()
    PLACES.forget()
    for tier in list(_LIVING):
        tier.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


register_tier(REMOTE_TIERS.find("disk"), DiskTier, lambda folder: free_disk(spill_folder(folder)))
