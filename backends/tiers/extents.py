"""Which bytes of a file, or of a piece of memory, are free."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Extents:
    """An allocator that takes the first extent that fits, of ``room`` bytes, or of as many as are wanted.

    ``free`` may be called by a finalizer at any moment, also inside ``take``: it waits for no lock. ``emptied`` is
    called when the last extent was freed.
    """

    emptied: Callable[[], None] | None = None
    room: int | None = None
    stop: int = 0  # the end of the last extent
    _freed: deque[tuple[int, int]] = field(default_factory=deque)
    _holes: list[tuple[int, int]] = field(default_factory=list)  # (start, stop), sorted, never adjacent
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fits(self, nbytes: int) -> bool:
        """Whether ``take`` finds room. What is freed meanwhile only adds to it."""
        with self._lock:
            self._merge()
            holes = (stop - start for start, stop in self._holes)
            return self.room is None or self.stop + nbytes <= self.room or any(hole >= nbytes for hole in holes)

    def take(self, nbytes: int) -> int:
        """Where to put ``nbytes``. With a ``room`` only what fits may be asked for."""
        with self._lock:
            self._merge()
            for place, (start, stop) in enumerate(self._holes):
                if stop - start >= nbytes:
                    self._holes[place : place + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                    return start
            self.stop += nbytes
            return self.stop - nbytes

    def free(self, start: int, nbytes: int) -> None:
        """Give an extent back."""
        self._freed.append((start, start + nbytes))
        if not self._lock.acquire(blocking=False):
            return  # the next to take the lock merges
        try:
            self._merge()
            if self.stop == 0 and self.emptied:
                self.emptied()
        finally:
            self._lock.release()

    def _merge(self) -> None:
        """Sort what was freed into the holes, and join neighbours; a hole at the end is none, but what is beyond."""
        while self._freed:
            insort(self._holes, self._freed.popleft())
        merged: list[tuple[int, int]] = []
        for start, stop in self._holes:
            if stop == start:
                continue
            joins = bool(merged) and merged[-1][1] == start
            merged.append((merged.pop()[0] if joins else start, stop))
        if merged and merged[-1][1] == self.stop:
            self.stop = merged.pop()[0]
        self._holes = merged
