"""An interrupt (Ctrl-C) while a model is looked at, and what the look has changed is put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class _Interrupts:
    """Whether things are put back, so that an interrupt waits, and whether one does."""

    waits: bool = False
    came: bool = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, at the first interrupt alone: what is put back behind it is put back whole."""
        if self.waits:
            self.came = True
            return
        self.waits = True
        signal.default_int_handler(number, frame)


@contextmanager
def interrupted_once() -> Iterator[_Interrupts]:
    """Inside, an interrupt ends what runs; a second one waits for the end, and so does the first if ``waits`` is set.

    Where a handler of somebody's own takes interrupts, it goes on to do so; in other threads there are none.
    """
    found = _Interrupts()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield found
        return
    signal.signal(signal.SIGINT, found.take)
    try:
        yield found
    finally:
        found.waits = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if found.came:
            raise KeyboardInterrupt
