"""Optimal schedules at a price: what a segment is worth decides what is kept.

Say that reversing a segment earns ``price``, in runs. A piece whose carry is kept with ``room`` in tier t, and whose
segments had u extra runs so far, then earns W(t, room, R) with R = price - u, where

    W(t, room, R) = max(rest, W(t, room, R - 1) - read + max(rest, W(t, room - 1, R) - write))

The first run from the carry stops where a new carry is kept in tier t, or where the ``rest`` is left to faster tiers
(in the fast tier it is taped, and earns block * R); then the run starts anew from the first carry, one extra run later.
It is the recurrence of H-Revolve (Herrmann and Pallez 2020, section 3) with a price instead of a length. The trees that
earn most at some price have the least cost for their length: they are the corners of the convex hull of the least cost
over the length (H. Everett, Operations Research 11(3), 1963, doi 10.1287/opre.11.3.399), and the line between the two
corners beside a length bounds its cost from below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from reroll.schedules.optimal.problem import Integers, Numbers, Store

_ROUNDING = 1e-9  # runs by which float64 may mistake the cost of a tree


@dataclass(frozen=True, slots=True)
class Row:
    """The trees of a tier whose segments can have equally many more runs, by room.

    ``parts``: into how many pieces of this tier the first run cuts it. 0: all is left to faster tiers, or taped.
    """

    value: Numbers
    length: Integers
    cost: Numbers
    parts: Integers


@dataclass(frozen=True, slots=True)
class Cut:
    """A tree as its first run cuts it: parts in its own tier, then a rest for faster ones or the tape, in segments."""

    length: int
    parts: Integers
    rest: int


@dataclass(frozen=True, slots=True)
class Whole:
    """The best tree of a tier and all faster ones for segments of which nothing is kept when the run comes to them."""

    tier: int
    value: float
    length: int
    cost: float


@dataclass(frozen=True, slots=True)
class Trees:
    """All trees of a price: ``rows[h][tier]`` and ``wholes[h][tier]`` if their segments can have h more extra runs."""

    price: float
    rows: tuple[tuple[Row, ...], ...]
    wholes: tuple[tuple[Whole, ...], ...]

    @property
    def length(self) -> int:
        """Segments of the whole tree."""
        return self.wholes[-1][-1].length if self.wholes else 0

    @property
    def cost(self) -> float:
        """Its extra cost."""
        return self.wholes[-1][-1].cost if self.wholes else 0

    def row(self, tier: int, runs: int) -> Row | None:
        """The trees whose segments had so many extra runs; None if they had too many."""
        return self.rows[-1 - runs][tier] if runs < len(self.rows) else None

    def whole(self, tier: int, runs: int) -> Whole | None:
        """The tree of a tier and all faster ones whose segments had so many extra runs; None if they had too many."""
        return self.wholes[-1 - runs][tier] if tier >= 0 and runs < len(self.wholes) else None

    def cut(self, tier: int, room: int, runs: int) -> Cut:
        """The first cut of the tree whose segments had so many extra runs; empty if they had too many."""
        row, shorter = self.row(tier, runs), self.row(tier, runs + 1)
        if row is None:
            return Cut(0, np.zeros(0, dtype=np.int64), 0)
        lengths = np.zeros_like(row.length) if shorter is None else shorter.length
        parts = lengths[room::-1][: row.parts[room]]
        return Cut(int(row.length[room]), parts, int(row.length[room] - parts.sum()))


def chains(ends: Numbers, links: Numbers) -> tuple[Numbers, Integers]:
    """y[i] = max(ends[i], links[i] + y[i - 1]) for all i, and the index at which each chain ends, the last of equals.

    With P the running sum of links, y[i] = P[i] + max over j <= i of ends[j] - P[j].
    """
    sums = np.cumsum(links)
    starts = ends - sums
    best = np.maximum.accumulate(starts)
    end: Integers = np.maximum.accumulate(np.where(starts == best, np.arange(len(ends)), 0))
    return sums + best, end


def _row(store: Store, before: Row, value: Numbers, length: Numbers, cost: float) -> Row:
    """The next row of a tier, one more run from each carry. What is left at its end has this value, length and cost."""
    # With room i further carries, e(i) = W(i, R - 1) - read earned by a new run from the first carry, and ``value`` by
    # the rest, the two maxima of the recurrence are one chain over the rooms:
    #     W(i) = max(value + max(0, e(i)), e(i) - write + W(i - 1))
    # From room i down to the end of the chain each link is a piece and a carry that the first run keeps behind it.
    again = before.value - store.read
    own = again > 0
    values, end = chains(value + np.maximum(again, 0), again - store.write)
    lengths = np.cumsum(before.length)
    costs = np.cumsum(before.cost + before.length + store.read + store.write)
    own_length, own_cost = before.length * own, (before.cost + before.length + store.read) * own
    return Row(
        values,
        (length + own_length)[end] + lengths - lengths[end],
        (cost + own_cost)[end] + costs - costs[end],
        np.arange(store.rooms) - end + own[end],
    )


def _grow(tiers: Sequence[Store], worth: float) -> Iterator[tuple[tuple[Row, ...], tuple[Whole, ...]]]:
    """Row after row of all tiers. In the first one a segment earns ``worth``, in each further one 1 more.

    W(t, ., R) reads row R - 1 of the same tier and row R of the faster ones, so rows are made in the order of R, and in
    each of them the tiers from the fast one on. Before the first one R <= 0: no segment is worth its runs.
    """
    rows = []
    for store in tiers:
        none = np.zeros(store.rooms, dtype=np.int64)
        rows.append(Row(none, none, none, none))
    while True:
        wholes: list[Whole] = []
        for tier, store in enumerate(tiers):
            if store.blocks is not None:
                row = _row(store, rows[tier], store.blocks * worth, store.blocks, 0)
            else:
                rest = wholes[-1]
                row = _row(store, rows[tier], np.array([rest.value]), np.array([rest.length]), rest.cost)
            top = Whole(tier, row.value[-1] - store.write, int(row.length[-1]), (row.cost[-1] + store.write).item())
            wholes.append(top if not wholes or top.value > wholes[-1].value else wholes[-1])
            rows[tier] = row
        yield tuple(rows), tuple(wholes)
        worth += 1


def at_price(tiers: Sequence[Store], price: float) -> Trees:
    """The trees that earn most at a price above 0."""
    last = math.ceil(price) - 1  # extra runs of a segment that still earns something: price - last is in (0, 1]
    found = list(islice(_grow(tiers, price - last), last + 1))
    return Trees(price, tuple(rows for rows, _ in found), tuple(wholes for _, wholes in found))


@dataclass(frozen=True, slots=True)
class Bracket:
    """The optimal trees beside a length, ``low`` shorter and ``high`` not shorter, and the cost between them."""

    low: Trees
    high: Trees
    bound: float


def bracket(tiers: Sequence[Store], steps: int) -> Bracket:
    """The corners of the convex hull beside ``steps`` segments.

    Starts from the whole prices beside them, which share all rows but one. Then one of the two moves to the tree that
    earns most at the price at which both earn the same, until that is no better.

    A tree earns price * length - cost, so what earns most at a price touches the hull with a line of that slope. At the
    slope of the line through ``low`` and ``high`` it lies below that line, as a corner between them, or there is none:
    both touch the hull with the same line, and no cost of a length in between is below it.
    """
    found: list[tuple[tuple[Row, ...], tuple[Whole, ...]]] = []
    for both in _grow(tiers, 1.0):
        found.append(both)
        if both[1][-1].length >= steps:
            break
    rows, wholes = tuple(rows for rows, _ in found), tuple(wholes for _, wholes in found)
    low, high = Trees(len(rows) - 1, rows[:-1], wholes[:-1]), Trees(len(rows), rows, wholes)
    while high.length > steps:
        dearer, longer = high.cost - low.cost, high.length - low.length
        price = dearer / longer
        if price in (low.price, high.price):
            break
        middle = at_price(tiers, price)
        if (middle.cost - low.cost) * longer >= dearer * (middle.length - low.length) - _ROUNDING * longer:
            break
        low, high = (low, middle) if middle.length >= steps else (middle, high)
    return Bracket(low, high, _between(low, high, steps))


def _between(low: Trees, high: Trees, steps: int) -> float:
    """The least cost on the line between two trees; whole if all costs are."""
    part, whole = (steps - low.length) * (high.cost - low.cost), high.length - low.length
    return low.cost + (-(-part // whole) if isinstance(part, int) else part / whole)
