"""Python's cycle collector while a model is compiled.

A full collection walks through the millions of objects of torch, and a first call has several, of 0.2 s each, which
find next to nothing. Inside of a compilation they wait until there is twenty times as much that is new.
"""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field

_SELDOM = 200  # collections of what is new before all is looked at; Python's default is 10


@dataclass(slots=True)
class Collections:
    """How many compilations run now, in all threads, and the user's threshold of full collections."""

    running: int = 0
    usual: tuple[int, int, int] = (0, 0, 0)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seldom(self) -> tuple[int, int, int]:
        """The thresholds while something is compiled."""
        young, middle, old = self.usual
        return young, middle, max(old, _SELDOM)

    def begin(self) -> None:
        """Let full collections wait; where the user has them wait longer, as the user has it."""
        with self.lock:
            self.running += 1
            if self.running == 1:
                self.usual = gc.get_threshold()
                gc.set_threshold(*self.seldom)

    def end(self) -> None:
        """Put the threshold back, unless it was changed inside."""
        with self.lock:
            self.running -= 1
            if self.running == 0 and gc.get_threshold() == self.seldom:
                gc.set_threshold(*self.usual)

    def __enter__(self) -> None:
        """The same as ``begin``."""
        self.begin()

    def __exit__(self, *_: object) -> None:
        """The same as ``end``."""
        self.end()


SELDOM_FULL = Collections()
"""Those of this process: a context for what compiles."""
