"""A device that works in the background, simulated on the CPU, with a checker of races.

The CPU's own work is that of the compute stream: it is done at once. Copies of side streams are done as late as their
events allow (``late``: when something waits for them), or at once; until then their targets hold poison. Whatever the
timing, the checker follows what is ordered behind what, by vector clocks: every stream and every thread knows, of each
stream, up to where its work is over. An access to memory is a race unless those that it conflicts with are known to be
over, and so is freeing memory of the device: a missing wait is found even where nothing went wrong this time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from reroll.backends.tiers.device import Stream
from simulated_streams import Access, Clock, Race, SimulatedEvent, SimulatedStream, learn

POISON = 0xFF  # in every byte: NaN in all formats of floats


class SimulatedDevice:
    """The memory of the CPU as that of a device with compute and side streams, and as pinned memory.

    The CPU's own work is that of the present one of ``computes``, ``compute``, which a test may change.

    room_for: bytes that it allocates at most for what comes back. pinnable: bytes that can be pinned.
    deaf: the line of ours (its file and number) whose waits do nothing. ``waits``: all lines that waited.
    behind: it takes much longer for any work than to launch it.
    """

    def __init__(
        self, *, late: bool = True, room_for: int | None = None, pinnable: int | None = None, behind: bool = False
    ) -> None:
        self.late, self.room_for, self.pinnable, self.behind = late, room_for, pinnable, behind
        self.deaf: tuple[str, int] | None = None
        self.waits: set[tuple[str, int]] = set()
        self.races: list[str] = []
        self.lock = threading.RLock()
        self.computes = [SimulatedStream(self, f"compute stream {number}") for number in range(2)]
        self.compute = self.computes[0]
        self.sides: list[SimulatedStream] = []
        self.known: dict[int, Clock] = defaultdict(dict)  # of every thread
        self.accesses: dict[int, list[Access]] = {}  # by the start of the memory
        self.made: dict[int, tuple[SimulatedStream, int]] = {}  # whose this memory is, and since when
        self.slabs: list[tuple[int, int]] = []
        self.allocated = self.most_allocated = self.refused = self.copies = 0
        self.recordings = self.replays = 0
        self.played: SimulatedEvent | None = None  # the end of the last recording that was played
        self.recording: int | None = None  # the thread that records
        self.waiting = False  # whether operations wait for it

    # What a device offers.

    def present(self) -> Stream:
        return self.compute

    def side(self) -> Stream:
        self.sides.append(SimulatedStream(self, f"side stream {len(self.sides)}"))
        return self.sides[-1]

    def pinned(self, nbytes: int) -> Tensor:
        if self.pinnable is not None and nbytes > self.pinnable:
            raise RuntimeError("CUDA error: out of memory (simulated)")
        self.pinnable = None if self.pinnable is None else self.pinnable - nbytes
        slab = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.slabs.append((slab.data_ptr(), slab.data_ptr() + nbytes))
        return slab

    def room(self, like: Tensor) -> Tensor:
        made = torch.empty(max(like.nbytes, 1), dtype=torch.uint8).fill_(POISON)[: like.nbytes]
        if self.room_for is not None and self.allocated + made.nbytes > self.room_for:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        with self.lock:
            self.allocated += made.nbytes
            self.most_allocated = max(self.most_allocated, self.allocated)
        self.made[_start_of(made)] = self.compute, self.compute.number
        weakref.finalize(made.untyped_storage(), self._returned, _start_of(made), made.nbytes)
        return made.view(like.dtype).view(like.shape)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        if not source.numel():
            return
        with self.lock:
            self.copies += 1
            number = stream.push(self._move(target, source))
            self._accessed(source, stream, number, writes=False)
            self._accessed(target, stream, number, writes=True)
            self._forbid_races()

    def seconds(self, work: Callable[[], object]) -> float:
        if not self.behind:
            return 0.0
        begin = time.perf_counter()
        work()
        return 100 * (time.perf_counter() - begin)

    def workspace(self) -> int:
        return 0

    def watched(self, run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], bool]:
        return run(), self.waiting

    def record(self, run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], Callable[[], None]]:
        self.recording = threading.get_ident()
        try:
            results = run()
        finally:
            self.recording = None
        self.recordings += 1

        def again() -> None:
            self.replays += 1
            with self.lock:
                known = {**self.compute.known, self.compute: self.compute.number}
                if self.played and known.get(self.played.stream, 0) < self.played.number:
                    self.races.append(
                        "A recording runs while one may be running on another stream, in the same memory."
                    )
                self.compute.number += 1
                self.played = self.compute.record_event()
                self._forbid_races()
            for result, new in zip(results, run(), strict=True):
                if result is not None and new is not None and result.data_ptr() != new.data_ptr():
                    result.copy_(new)

        return results, again

    # The checker.

    def computed(self) -> None:
        """Work was queued on the compute stream: a mark from before is not behind it."""
        with self.lock:
            self.compute.number += 1
            self._forbid_races()

    def used(self, parts: Iterable[Tensor]) -> None:
        """The compute stream reads these tensors."""
        with self.lock:
            learn(self.compute.known, self.known_here())
            for part in parts:
                self._forbid_conflicts(part, self.compute.known, "used by the compute stream")
            self._forbid_races()

    def touched(self, parts: Iterable[Tensor]) -> None:
        """This thread reads or writes these tensors."""
        with self.lock:
            for part in parts:
                self._forbid_conflicts(part, self.known_here(), "touched by a thread")
            self._forbid_races()

    def is_idle(self) -> bool:
        """Whether this thread knows that all copies are over."""
        return all(self.known_here().get(side, 0) >= side.number for side in self.sides)

    def forbid_unjoined(self, leaving: Iterable[Tensor]) -> None:
        """Raise Race if memory of the device is still in use by a side stream, other than what is kept for that."""
        kept = {_start_of(part) for part in leaving}
        for start, accesses in list(self.accesses.items()):
            for access in accesses:
                if not self._is_pinned(start) and start not in kept and not access.is_over(self.compute.known):
                    self.races.append(f"{access.stream.name} was never joined")
        self._forbid_races()

    def known_here(self) -> Clock:
        """What this thread knows to be over."""
        return self.known[threading.get_ident()]

    def ignores_this_wait(self) -> bool:
        """Whether the line of ours that waits is the deaf one."""
        if self.recording == threading.get_ident():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (simulated)")
        frame = sys._getframe(2)
        line = (Path(frame.f_code.co_filename).name, frame.f_lineno)
        self.waits.add(line)
        return line == self.deaf

    def _returned(self, start: int, nbytes: int) -> None:
        with self.lock:
            self.allocated -= nbytes
        del self.made[start]

    def _move(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """A copy that owns neither memory."""
        to, origin = weakref.ref(target.untyped_storage()), weakref.ref(source.untyped_storage())
        addresses, expected = (target.data_ptr(), source.data_ptr()), _bytes_of(source)
        pinned = self._is_pinned(_start_of(source))

        def move() -> None:
            if to() is None or origin() is None:
                return  # which the checker was told of
            if not pinned and ctypes.string_at(addresses[1], len(expected)) != expected:
                self.races.append("The source of a copy was changed before the copy was done.")
            ctypes.memmove(*addresses, len(expected))

        return move

    def _accessed(self, part: Tensor, stream: SimulatedStream, number: int, *, writes: bool) -> None:
        storage, first = part.untyped_storage(), part.data_ptr()
        start = storage.data_ptr()
        access = Access(first, first + part.nbytes, stream, number, writes)
        if not self._is_pinned(start):
            owner, since = self.made.get(start, (self.compute, self.compute.number))
            if stream.known.get(owner, 0) < since:
                self.races.append(f"{stream.name} copies without waiting for {owner.name}.")
            if start not in self.accesses:
                weakref.finalize(storage, self._freed, start, owner)
        before = self.accesses.setdefault(start, [])
        self._forbid_conflicts(part, {**stream.known, stream: number}, f"copied by {stream.name}", writes=writes)
        covered = {each for each in before if writes and each.start >= access.start and each.stop <= access.stop}
        self.accesses[start] = [each for each in before if each not in covered] + [access]

    def _forbid_conflicts(self, part: Tensor, known: Clock, what: str, *, writes: bool = True) -> None:
        first, end = part.data_ptr(), part.data_ptr() + part.nbytes
        for each in self.accesses.get(_start_of(part), ()):
            if each.start < end and first < each.stop and (writes or each.writes) and not each.is_over(known):
                self.races.append(f"Memory is {what} before {each.stream.name} is known to be done with it.")

    def _freed(self, start: int, owner: SimulatedStream) -> None:
        with self.lock:
            if any(not each.is_over(owner.known) for each in self.accesses.pop(start, ())):
                self.races.append("Memory of the device is freed before the copy from or to it is known to be over.")

    def _is_pinned(self, start: int) -> bool:
        return any(low <= start < high for low, high in self.slabs)

    def _forbid_races(self) -> None:
        if self.races:
            raise Race(self.races[0])


def _start_of(part: Tensor) -> int:
    return part.untyped_storage().data_ptr()


def _bytes_of(part: Tensor) -> bytes:
    return ctypes.string_at(part.data_ptr(), part.nbytes)
