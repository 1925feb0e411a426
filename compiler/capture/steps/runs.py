"""Runs in a list of items: blocks of a few items whose numbers grow evenly from block to block."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

Item = tuple[Any, tuple[int | float, ...]]
"""What is equal in all blocks of a run, and what grows evenly."""
LONGEST_PERIOD = 16
FEWEST_BLOCKS = 3


def longest(items: Sequence[Item], at: int) -> tuple[int, int]:
    """(items in a block, blocks) of the run from ``at`` on that covers most, in the smallest blocks; (1, 1) if none."""
    best = 1, 1
    for period in range(1, min(LONGEST_PERIOD, (len(items) - at) // FEWEST_BLOCKS) + 1):
        blocks = _blocks(items, at, period)
        if blocks >= FEWEST_BLOCKS and blocks * period > best[0] * best[1]:
            best = period, blocks
            if at + period * (blocks + 1) > len(items):
                break
    return best


def slopes(items: Sequence[Item], at: int, period: int) -> list[tuple[int | float, ...]]:
    """By how much the numbers of each item of a block differ from those of the block before."""
    blocks = zip(items[at : at + period], items[at + period : at + 2 * period], strict=True)
    return [tuple(map(operator.sub, new, old)) for (_, old), (_, new) in blocks]


def _blocks(items: Sequence[Item], at: int, period: int) -> int:
    """How many blocks from ``at`` on differ evenly; the first two do if they have the same keys."""
    if any(items[at + place][0] != items[at + period + place][0] for place in range(period)):
        return 1
    grows, stop = slopes(items, at, period), at + 2 * period
    while stop < len(items):
        key, numbers = items[stop - period]
        if items[stop] != (key, tuple(map(operator.add, numbers, grows[(stop - at) % period]))):
            break
        stop += 1
    return (stop - at) // period
