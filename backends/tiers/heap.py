"""The heap of the process: what was freed goes back to the system.

torch asks for memory at multiples of 64 bytes. Before version 2.38, glibc takes for that a piece that is larger than
what it gives, so the hole that a tensor leaves is too small for another tensor of its size, unless what lies beside it
is free, too. A process that moves its carries off would hold their bytes nevertheless, as holes between the small
things that it keeps. ``malloc_trim`` gives the pages of holes back; it takes microseconds.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_EVERY = 1 << 26  # bytes freed between two returns


@cache
def _trim() -> Any:
    """glibc's ``malloc_trim``; None where the C library has no such function."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


class _Freed:
    """Bytes since the last return. Threads may lose some of each other's, which does no harm; a lock could be left
    taken in a forked process."""

    nbytes = 0


def give_back(nbytes: int) -> None:
    """Note that tensors of so many bytes were freed, or soon will be; now and then their pages go to the system."""
    _Freed.nbytes += nbytes
    if _Freed.nbytes >= _EVERY:
        _Freed.nbytes = 0
        trim = _trim()
        if trim is not None:
            trim(0)
