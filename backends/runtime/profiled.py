"""Names under which torch.profiler shows what a program does: those of its instructions, and of segments inside them.

Whether a profiler runs is a flag of torch's Python modules, ``_is_profiler_enabled``, which is private but made for
checks like this one (it is there in torch 2.11 and 2.13): ``record_function`` alone takes microseconds when none runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_UNSEEN = nullcontext()


def named(loop: str, name: Callable[..., str], *args: Any) -> AbstractContextManager[Any]:
    """A context that torch.profiler shows as "reroll: <loop> <name>", with the name that ``name`` makes of ``args``;
    it is not asked for where no profiler runs."""
    if not profiler._is_profiler_enabled:
        return _UNSEEN
    return profiler.record_function(f"reroll: {loop} {name(*args)}")
