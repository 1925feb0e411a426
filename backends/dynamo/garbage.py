"""Python's cycle collector while a model is compiled.

A full collection walks through the millions of objects of torch, and a first call has several, of 0.2 s each, which
find next to nothing. Inside of a compilation they wait until there is twenty times as much that is new. One that is due
then comes at its end, and not in the first training step, whose time ``explain`` tells.
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
    young: int = 0  # collections since the last full one, when the first began
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
                self.usual, self.young = gc.get_threshold(), gc.get_count()[2]
                gc.set_threshold(*self.seldom)

    def end(self) -> None:
        """Put the threshold back, unless it was changed inside, and collect if that is due then."""
        with self.lock:
            self.running -= 1
            if self.running or gc.get_threshold() != self.seldom:
                return
            gc.set_threshold(*self.usual)
            due = gc.isenabled() and gc.get_count()[2] - self.young > self.usual[2] > 0
        if due:
            gc.collect()

    def __enter__(self) -> None:
        """The same as ``begin``."""
        self.begin()

    def __exit__(self, *_: object) -> None:
        """The same as ``end``."""
        self.end()


SELDOM_FULL = Collections()
"""Those of this process: a context for what compiles."""
