"""A line that says what is being compiled, where that takes long and somebody looks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

PATIENCE = 2.0  # seconds after which a line is shown


@contextmanager
def progress(what: str, console: Console | None = None) -> Iterator[None]:
    """Show ``what`` on a terminal, with a spinner, from ``PATIENCE`` seconds after the start until the end."""
    console = console or Console(stderr=True)
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
