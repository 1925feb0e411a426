"""The heap of the process: what was freed goes back to the system.

torch asks for memory at multiples of 64 bytes. Before version 2.38, glibc takes for that a piece that is larger than
what it gives, so the hole that a tensor leaves is too small for another tensor of its size, unless what lies beside it
is free, too. A process that moves its carries off would hold their bytes nevertheless, as holes between the small
things that it keeps. ``malloc_trim`` gives the pages of holes back. It looks at every hole, which takes a microsecond
each: where there are very many, it is called less often, so that it takes a small part of the time.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

_EVERY = 1 << 26  # bytes freed between two returns
_SHARE = 0.05  # of the time that returns may take


@cache
def _trim() -> Any:
    """glibc's ``malloc_trim``; None where the C library has no such function."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


class _Freed:
    """Bytes since the last return, when that ended, and how long it took. Threads may lose some of each other's, which
    does no harm; a lock could be left taken in a forked process."""

    nbytes = 0
    ended = took = 0.0


def give_back(nbytes: int) -> None:
    """Note that tensors of so many bytes were freed, or soon will be; now and then their pages go to the system."""
    _Freed.nbytes += nbytes
    trim = _trim()
    if _Freed.nbytes < _EVERY or trim is None:
        return
    begin = time.perf_counter()
    if _Freed.took > _SHARE * (begin - _Freed.ended):
        return
    _Freed.nbytes = 0
    trim(0)
    _Freed.ended = time.perf_counter()
    _Freed.took = _Freed.ended - begin
