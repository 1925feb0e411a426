"""Copies between a device and pinned memory, beside the device's work: one side stream for each direction.

Memory of the device belongs to the stream on which it was allocated, and is freed behind the work of that stream: so
it is kept until that stream has been told to wait for the copy (no ``record_stream``, which would let the allocator
wait for an unknown time, and memory grow). The CPU waits for nothing, but to fill pinned memory. What waits for what:

- a write: for the work that made its sources, and for reads from pinned memory that it may write over;
- a read: for the write, and for the stream on which its targets were allocated;
- the reader of the values: for the read. And sources and targets are dropped only behind that.

Pinned memory of the computer comes in slabs that are kept for the next block.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch

from reroll.backends.tiers.device import Device, Event, Stream, device_of
from reroll.backends.tiers.extents import Extents
from reroll.backends.tiers.tier import STAGING
from reroll.errors import StorageError
from reroll.words.units import nbytes_text

if TYPE_CHECKING:
    from torch import Tensor


ALIGNMENT = 64  # bytes
_SMALLEST, _LARGEST = 1 << 26, 1 << 30  # bytes of a slab, if no block is larger


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """Tensors in pinned memory, there once ``written`` is over. The pool's again when nobody refers to ``room``."""

    room: Pinned
    written: Event

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return self.room.parts


@dataclass(slots=True, eq=False)
class _Targets:
    """Memory of the device into which something is copied: whose it is, and until when it may not be freed."""

    stream: Stream
    tensors: list[Tensor]
    allocated: Event
    arrived: Event | None = None
    abandoned: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)  # a finalizer may run inside of what holds it

    def arrive(self, event: Event) -> None:
        """The copy is under way, until this event; a finalizer may have given it up meanwhile."""
        self.arrived = event
        if self.abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Free the memory, behind the copy if that is under way."""
        with self.lock:
            self.abandoned = True
            if self.arrived:
                self.stream.wait_event(self.arrived)
            self.tensors = []


class Arrival:
    """Tensors on their way to the device; given up if nobody takes them."""

    def __init__(self, targets: _Targets) -> None:
        self.targets = targets
        self._abandon = weakref.finalize(self, targets.abandon)
        self._abandon.atexit = False  # type: ignore[misc]  # typeshed lacks the slot

    def take(self) -> list[Tensor]:
        """The tensors, for work of the stream on which they were allocated; it waits for them. Once only."""
        targets = self.targets
        if targets.arrived is None:
            raise AssertionError("the copy is started before its results are taken")
        targets.stream.wait_event(targets.arrived)
        self._abandon.detach()
        tensors, targets.tensors = targets.tensors, []
        return tensors


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Pinned memory that a thread fills, from where it is sent to the device: ``ready``, then fill, then ``send``."""

    transfers: Transfers
    room: Pinned
    free: tuple[Event, ...]  # over once nothing reads from the room, or writes into it, any more
    arrival: Arrival

    def ready(self) -> None:
        """Let this thread wait until it may fill the room."""
        for event in self.free:
            event.synchronize()

    def send(self) -> None:
        """Start to copy to the device."""
        self.transfers.send(self.arrival.targets, self.room.parts)


class Transfers:
    """The side streams of one device, and its pinned memory. Calls may come from several threads."""

    def __init__(self, device: Device, staging: int = STAGING) -> None:
        self.device, self.staging = device, staging
        self.pool = Pool(device)
        self._writing, self._reading = device.side(), device.side()
        self._leaving: deque[tuple[Stream, Event, list[Tensor]]] = deque()  # sources, the oldest first
        self._has_read = False  # since the last write
        self._lock = threading.Lock()

    def park(self, sources: Sequence[Tensor]) -> Parked:
        """Copy tensors to pinned memory behind the present work. Nobody may change them until that is done.

        The sources of ``staging`` blocks are kept at most. Raises StorageError if no memory can be pinned.
        """
        with self._lock:
            self._let_go(self.staging - 1)
            room = self.pool.take(sources)
            present = self.device.present()
            self._writing.wait_event(present.record_event())
            if self._has_read:
                self._writing.wait_event(self._reading.record_event())
                self._has_read = False
            for target, source in zip(room.parts, sources, strict=True):
                self.device.copy(target, source, self._writing)
            written = self._writing.record_event()
            self._leaving.append((present, written, list(sources)))
        return Parked(room, written)

    def land(self, likes: Sequence[Tensor]) -> Landing:
        """Pinned memory for a thread to fill, and memory of the device for what it fills in."""
        arrival = self.expect(likes)
        with self._lock:
            room = self.pool.take(likes)
            return Landing(self, room, (self._writing.record_event(), self._reading.record_event()), arrival)

    def expect(self, likes: Sequence[Tensor]) -> Arrival:
        """Allocate memory of the device, on the present stream, for tensors that will be sent there."""
        self.settle()
        present = self.device.present()
        tensors = [self.device.room(like) for like in likes]
        return Arrival(_Targets(present, tensors, present.record_event()))

    def send(self, targets: _Targets, parts: Sequence[Tensor], written: Event | None = None) -> None:
        """Start to copy from pinned memory to the device, unless nobody wants that any more."""
        with self._lock, targets.lock:
            if targets.abandoned:
                return
            self._reading.wait_event(targets.allocated)
            if written:
                self._reading.wait_event(written)
            tensors = targets.tensors  # to outlive the copy, whatever a finalizer does
            for target, source in zip(tensors, parts, strict=True):
                self.device.copy(target, source, self._reading)
            self._has_read = True
            targets.arrive(self._reading.record_event())

    def settle(self) -> None:
        """Drop all sources, behind their copies."""
        with self._lock:
            self._let_go(0)

    def drain(self) -> None:
        """Wait for all copies."""
        with self._lock:
            self._let_go(0)
            for stream in (self._writing, self._reading):
                stream.record_event().synchronize()

    def _let_go(self, limit: int) -> None:
        """Drop the sources of all blocks but the last ones, behind their copies."""
        while len(self._leaving) > limit:
            stream, written, _ = self._leaving[0]
            stream.wait_event(written)
            self._leaving.popleft()


@cache
def transfers_of(device: torch.device) -> Transfers:
    """The transfers of a device that works in the background: one for each in a process."""
    found = device_of(device)
    if found is None:
        raise AssertionError(f"copies of {device} are done at once")
    return Transfers(found)


@dataclass(slots=True, eq=False)
class _Slab:
    memory: Tensor  # of bytes
    extents: Extents


class Pinned:
    """Room for the tensors of one block: ``parts``. It goes back to the pool when nobody refers to this object.

    Whoever takes it next has to wait for the copies from and to it that are under way (``Transfers`` does).
    """

    def __init__(self, parts: tuple[Tensor, ...], slab: _Slab, start: int, nbytes: int) -> None:
        self.parts = parts
        finalizer = weakref.finalize(self, slab.extents.free, start, nbytes)
        finalizer.atexit = False  # type: ignore[misc]  # typeshed lacks the slot


@dataclass(slots=True, eq=False)
class Pool:
    """Slabs of pinned memory. Pinning takes a second for a few GB, so they stay pinned until it fails.

    Slabs grow with what is pinned already, from 64 MiB to 1 GiB, in powers of two, to which torch's allocator rounds.
    """

    device: Device
    slabs: list[_Slab] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def take(self, likes: Sequence[Tensor]) -> Pinned:
        """Room for tensors like these, of any device. Raises StorageError if no more memory can be pinned."""
        sizes = [-(-like.nbytes // ALIGNMENT) * ALIGNMENT for like in likes]
        total = sum(sizes)
        slab = next((slab for slab in self.slabs if slab.extents.fits(total)), None) or self._grow(total)
        start = at = slab.extents.take(total)
        parts: list[Tensor] = []
        for like, size in zip(likes, sizes, strict=True):
            parts.append(slab.memory[at : at + like.nbytes].view(like.dtype).view(like.shape))
            at += size
        return Pinned(tuple(parts), slab, start, total)

    def trim(self) -> None:
        """Forget slabs that hold nothing. Nothing may be under way."""
        self.slabs = [slab for slab in self.slabs if slab.extents.stop or not slab.extents.fits(slab.memory.numel())]

    def _grow(self, nbytes: int) -> _Slab:
        usual = min(max(_power_of_two(self.nbytes), _SMALLEST), _LARGEST)
        size = max(usual, _power_of_two(nbytes))
        try:
            memory = self.device.pinned(size)
        except RuntimeError:
            self.trim()
            memory = self._least(nbytes)
        self.slabs.append(_Slab(memory, Extents(room=memory.numel())))
        return self.slabs[-1]

    def _least(self, nbytes: int) -> Tensor:
        try:
            return self.device.pinned(max(_power_of_two(nbytes), ALIGNMENT))
        except RuntimeError as error:
            raise StorageError(
                f"{nbytes_text(nbytes)} of the computer's memory cannot be pinned for the host tier "
                f"({str(error).splitlines()[0]}); {nbytes_text(self.nbytes)} are. Free memory, raise the limit of "
                "locked memory (ulimit -l), use remote='disk', or a smaller batch, then repeat the training step."
            ) from error


def _power_of_two(nbytes: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(nbytes - 1, 0).bit_length()
