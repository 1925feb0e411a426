"""What is said where something takes long: a line on what is compiled, a hint on what may be wrong.

rich, which shows it, is loaded when it is needed.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reroll.errors import RerollWarning

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 2.0  # seconds after which a line is shown
LONG = 10.0  # seconds after which a hint is given
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


def _terminal() -> Console:
    """What shows messages to the user."""
    with python_random_kept():
        from rich.console import Console
    return Console(stderr=True)


@contextmanager
def progress(what: str, console: Console | None = None) -> Iterator[None]:
    """Show ``what`` on a terminal, with a spinner, from ``PATIENCE`` seconds after the start until the end."""
    next(_BEGUN)
    console = console or _terminal()
    if not console.is_terminal:
        yield
        return
    status = console.status(f"reroll: {what}")
    timer = threading.Timer(PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def telling_of_compilation(name: str) -> Iterator[None]:
    """Warn if something was compiled inside, which counts in what ``name`` measures there."""
    before = next(_BEGUN)
    yield
    if next(_BEGUN) > before + 1:
        text = f"{name}: the call compiled a loop, which counts. Call it once before, and measure then."
        warnings.warn(text, RerollWarning, stacklevel=4)


@contextmanager
def hinting(text: Callable[[], str], *, wanted: bool) -> Iterator[Callable[[], None]]:
    """Warn ``LONG`` seconds after the start, if ``wanted``, unless the function that is given is called before."""
    if not wanted:
        yield lambda: None
        return
    console = _terminal()  # here: rich is not to be loaded while another thread draws random numbers
    timer = threading.Timer(LONG, lambda: _warn(text(), console))
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _warn(text: str, console: Console) -> None:
    """Warn from a thread, where an error, to which a filter may turn it, reaches nobody."""
    try:
        warnings.warn(text, RerollWarning, stacklevel=1)
    except RerollWarning:
        console.print(text)
