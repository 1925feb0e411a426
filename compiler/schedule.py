"""Where carries are kept: a schedule is a tree of intervals of steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps [start, stop), whose first carry is kept in ``tier`` ("local", "host", "disk").

    While the interval is run over (the root: by the forward; any other: by a replay from its own carry), the carry at
    the start of each child is kept in the child's tier; the first child shares the carry of its parent where both are
    local. An interval without children is taped and reversed as a whole; one with children is reversed child by
    child, last to first. Children that have the same ``block`` number are written and read as one transfer.
    """

    start: int
    stop: int
    tier: str = "local"
    children: tuple[Interval, ...] = ()
    block: int | None = None
