"""What a call allocates and releases on cards, from the history of torch's allocator there.

The counters of the allocator tell the highest sum, not what was in it: gradients that a call makes behind its peak
could not be told from those that are in the peak.

Private torch API, tried on 2.11: ``torch.cuda.memory._record_memory_history`` and ``_snapshot``, for which there is no
public name. 2.13 has them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from reroll.backends.measure.events import Event

_SIGNS = {"alloc": 1, "free_requested": -1}  # where max_memory_allocated counts, too: a block is gone when it is asked


def traced_on_cards(fn: Callable[[], Any], settle: Callable[[], None]) -> tuple[Any, list[list[Event]]]:
    """What a call gives, and the memory events of each card during it, in order. ``settle`` waits for the cards."""
    settle()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    try:
        result = fn()
        settle()
        snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return result, [_events(trace) for trace in snapshot["device_traces"]]


def _events(trace: Iterable[Mapping[str, Any]]) -> list[Event]:
    told = [each for each in trace if each["action"] in _SIGNS]
    return [
        Event(number, each["addr"], _SIGNS[each["action"]] * each["size"], False) for number, each in enumerate(told)
    ]
