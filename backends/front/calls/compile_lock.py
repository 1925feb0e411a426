"""One thread at a time looks at a model or compiles it; what is compiled runs at any time, in all of them at once.

Torch's stance, which a look sets, is that of the process. So a thread has a *turn* while it calls a compiled model, and
ends it while the compiled graph runs: a forward that waits for another thread's goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from reroll.backends.dynamo.garbage import SELDOM_FULL


class _Turns(threading.local):
    """How often this thread has taken its turn, one inside of the other."""

    depth = 0


_mine = _Turns()
_lock = threading.Lock()


def _begin() -> None:
    _lock.acquire()
    try:
        SELDOM_FULL.begin()
    except BaseException:  # an interrupt
        _lock.release()
        raise


def _end() -> None:
    SELDOM_FULL.end()
    _lock.release()


@contextmanager
def turn() -> Iterator[None]:
    """Wait for this thread's turn, and have it inside."""
    if _mine.depth == 0:
        _begin()
    _mine.depth += 1
    try:
        yield
    finally:
        if _mine.depth:  # an interrupt may have come while it waited for its turn again
            _mine.depth -= 1
            if _mine.depth == 0:
                _end()


@contextmanager
def between_turns() -> Iterator[None]:
    """Let others have their turn inside."""
    depth, _mine.depth = _mine.depth, 0
    if depth:
        _end()
    try:
        yield
    finally:
        if depth:
            _begin()
        _mine.depth = depth


def _begin_anew() -> None:
    """Runs in a forked process, which has one thread: another one's turn is over."""
    global _lock  # noqa: PLW0603
    if _mine.depth == 0:
        _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
