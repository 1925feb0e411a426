"""What is said where something takes long: a line on what is compiled, a hint on what may be wrong.

What takes long is a matter of CPU time, so that it does not depend on what else the machine does; a spinner on a
terminal follows the clock. rich, which turns it, is loaded when it is needed: loading it takes as long as a small step.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reroll.errors import warn

if TYPE_CHECKING:
    from rich.status import Status

PATIENCE = 2.0  # seconds after which a line is shown on a terminal
QUIET = 5.0  # seconds of CPU time after which a line is written where there is no terminal
_TICK = 0.01  # seconds between two looks at the CPU time
LOG = logging.getLogger(__name__)
_BEGUN = itertools.count()  # what began to be compiled in this process


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Put back Python's random numbers behind the first import of rich, which draws one of them.

    Once rich is loaded nothing is put back: another thread may draw meanwhile.
    """
    if "rich.console" in sys.modules:
        yield
        return
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _spinner(what: str) -> Status:
    """A line on a terminal that turns once it is started."""
    with python_random_kept():
        from rich.console import Console
        from rich.text import Text
    return Console(stderr=True).status(Text(f"reroll: {what}"))


def tell(what: str) -> None:
    """Write a line on what is going on."""
    if sys.stderr is not None:
        sys.stderr.write(f"reroll: {what}\n")


class _Alarm:
    """Calls a function, in a thread of its own, when this process has taken so many seconds of CPU time."""

    def __init__(self, seconds: float, then: Callable[[], None]) -> None:
        self._end, self._then, self._off = _cpu_seconds() + seconds, then, threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def cancel(self) -> None:
        """Call it off."""
        self._off.set()

    def _wait(self) -> None:
        while (left := self._end - _cpu_seconds()) > 0:
            if self._off.wait(max(left, _TICK)):  # CPU time goes no faster than the clock, but for several threads
                return
        if not self._off.is_set():
            self._then()


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for, such as the C++ compiler."""
    return sum(os.times()[:4])


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show ``what`` on a terminal, with a spinner, from ``PATIENCE`` seconds after the start until the end; elsewhere
    write it once, after ``QUIET`` seconds of CPU time."""
    next(_BEGUN)
    LOG.debug("%s", what)
    if sys.stderr is None or not sys.stderr.isatty():
        alarm = _Alarm(QUIET, lambda: tell(what))
        try:
            yield
        finally:
            alarm.cancel()
        return
    shown: list[Status] = []

    def show() -> None:
        shown.append(_spinner(what))
        shown[0].start()

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()


@contextmanager
def telling_of_compilation(name: str) -> Iterator[None]:
    """Warn if something was compiled inside, which counts in what ``name`` measures there."""
    before = next(_BEGUN)
    yield
    if next(_BEGUN) > before + 1:
        text = f"{name}: the call compiled a loop, which counts. Call it once before, and measure then."
        warn(text)
