"""Allocations and releases in the order of time, and the most bytes that were held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (positive bytes) or a release (negative) at an address; ``inside`` of a compiled recurrence?"""

    nanoseconds: int
    address: int
    nbytes: int
    inside: bool


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where the memory of tensors begins."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def peak_of(events: Sequence[Event], excluded: set[int]) -> tuple[int, int]:
    """The most bytes that were allocated and not freed: of compiled recurrences, and of all else.

    Without the last block at each of the excluded addresses.
    """
    final = {event.address: index for index, event in enumerate(events) if event.nbytes > 0}
    live: dict[int, Event] = {}
    held, peak = {True: 0, False: 0}, (0, 0)
    for index, event in enumerate(events):
        if event.nbytes < 0:
            known = live.pop(event.address, None)
            held[bool(known and known.inside)] -= known.nbytes if known else 0
        elif not (event.address in excluded and final[event.address] == index):
            live[event.address] = event
            held[event.inside] += event.nbytes
            peak = max(peak, (held[True], held[False]), key=sum)
    return peak
