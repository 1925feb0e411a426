"""Revolve: optimal checkpoints in slots of one tier, in closed form.

A. Griewank, A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000, doi 10.1145/347837.347846. In s slots, one of
which holds the first carry, C(s + r, s) segments can be reversed with at most r extra runs of each. The least cost is
convex in the number of segments, and its slope is the number of extra runs that are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reroll.schedules.optimal.problem import Integers, Piece, at_least_one


def reach(slots: int, runs: int) -> int:
    """The most segments that can be reversed if none has more than ``runs`` extra runs: C(s + r, s), theorem 1."""
    return math.comb(slots + runs, slots) if runs >= 0 else 0


def reach_sum(slots: int, runs: int) -> int:
    """The sum of ``reach`` over 0, 1, ..., ``runs``: C(s + r + 1, s + 1)."""
    return math.comb(slots + runs + 1, slots + 1) if runs >= 0 else 0


def most_runs(steps: int, slots: int) -> int:
    """The least r with which ``steps`` segments are within reach: C(s + r - 1, s) < steps <= C(s + r, s)."""
    low, high = -1, 1
    while reach(slots, high) < steps:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reach(slots, middle) < steps else (low, middle)
    return high


def least_extra(steps: int, slots: int) -> int:
    """The least extra runs: r l - C(s + r, s + 1), theorem 1 without the runs that tape. Raises OptionError."""
    at_least_one(steps=steps, slots=slots)
    runs = most_runs(steps, slots)
    return runs * steps - reach_sum(slots, runs - 1)


def parts(steps: int, slots: int) -> list[int]:
    """The lengths of the pieces into which the first run cuts ``steps`` segments; the last one, a segment, it tapes.

    Piece i is reversed in s - i slots. All its lengths from C(s - i + r - 2, s - i) to C(s - i + r - 1, s - i) are
    optimal, where r are the most extra runs; all pieces but one have one of these two lengths.
    """
    runs = most_runs(steps, slots)
    rooms = range(slots, 0, -1)
    lows = np.array([reach(room, runs - 2) for room in rooms] + [1])
    highs = np.array([reach(room, runs - 1) for room in rooms] + [1])
    lengths: list[int] = spread(lows, highs, steps).tolist()
    return [length for length in lengths if length]


def spread(lows: Integers, highs: Integers, length: int) -> Integers:
    """Lengths from ``lows`` to ``highs``, the last ones grown first; the first gives or takes what is still missing."""
    while True:
        slack = highs - lows
        behind = np.cumsum(slack[::-1])[::-1] - slack
        lengths: Integers = lows + np.clip(length - lows.sum() - behind, 0, slack)
        lengths[0] += length - lengths.sum()
        if lengths[0] >= 0:
            return lengths
        lows, highs = lows[1:], highs[1:]


@dataclass(frozen=True, slots=True)
class Revolve:
    """The schedule of revolve for the segments of ``root``, in one slot more than it has room."""

    root: Piece

    @property
    def extra(self) -> int:
        """The least extra runs."""
        return least_extra(self.root.length, self.root.room + 1)

    @property
    def bound(self) -> int:
        """The same: the schedule is optimal."""
        return self.extra

    def pieces(self, piece: Piece) -> tuple[Piece, ...]:
        """The parts of a piece in order, see ``Schedule``. Empty for one that is taped whole."""
        if piece.tier is None:
            return ()
        return in_slots(piece.length, piece.room + 1)


def in_slots(steps: int, slots: int) -> tuple[Piece, ...]:
    """The parts of ``steps`` segments whose carry is kept in one of so many slots; empty if they are taped whole."""
    *kept, rest = parts(steps, slots)
    pieces = (Piece(length, 0, min(slots - 1 - at, length - 1)) for at, length in enumerate(kept))
    return (*pieces, Piece(rest, None, 0)) if kept else ()
