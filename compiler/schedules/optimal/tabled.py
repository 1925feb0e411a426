"""Optimal schedules of few segments, over any number of tiers, from tables of all lengths.

The recurrence of H-Revolve (Herrmann and Pallez 2020, doi 10.1145/3378672, section 3.2) over the fast tier of
``reversal``: l segments whose first carry is in hand and kept in tier t, with ``room`` for further carries there, cost

    L(t, room, l) = min(rest(l), min over j of j + L(t, room, j) + read + min(rest(l - j), write + L(t, room - 1, l -
    j)))

``rest(l)`` is what l segments cost if faster tiers reverse them; in the fast tier it is 0 if they can be taped at once.
So carries of a slow tier lie before those of faster tiers that are kept with them; the tests search all other
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reroll.schedules.optimal.problem import Integers, Piece, Store

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Table:
    """By length: the least cost, where the first run stops first (0: nowhere), and the cost of what is left there."""

    costs: Floats
    stops: Integers
    rests: Floats


@dataclass(frozen=True, slots=True)
class Tabled:
    """An optimal schedule. ``tables`` by tier and room; ``wholes`` by tier and length: which tier up to it is best."""

    tiers: tuple[Store, ...]
    tables: tuple[tuple[_Table, ...], ...]
    wholes: tuple[Integers, ...]
    root: Piece
    extra: float

    @property
    def bound(self) -> float:
        """The schedule is optimal."""
        return self.extra

    def pieces(self, piece: Piece) -> tuple[Piece, ...]:
        """The parts of a piece in order, see ``Schedule``. Empty for one that is taped whole."""
        if piece.tier is None:
            return ()
        found: list[Piece] = []
        tier: int | None = piece.tier
        rest, (room,) = piece.length, piece.where
        while tier is not None:
            stop = int(self._table(tier, room).stops[rest])
            if stop:
                found.append(_piece(stop, tier, room))
                rest -= stop
            if stop and self._kept(tier, room, rest):
                room -= 1
                continue
            tier = int(self.wholes[tier - 1][rest]) if tier else None
            room = 0 if tier is None else self.tiers[tier].rooms - 1
        return (*found, Piece(rest, None, 0)) if found else ()

    def _table(self, tier: int, room: int) -> _Table:
        """The table of a room; without a limit there is one for all."""
        tables = self.tables[tier]
        return tables[min(room, len(tables) - 1)]

    def _kept(self, tier: int, room: int, length: int) -> bool:
        """Whether a carry is kept before a rest of this length."""
        if room == 0:
            return False
        kept = self._table(tier, room - 1).costs[length] + self.tiers[tier].write
        return bool(kept < self._table(tier, room).rests[length])


def _piece(length: int, tier: int, room: int) -> Piece:
    """A piece. In a slow tier it is said to have no more room than there are places in it for a carry."""
    return Piece(length, tier, min(room, length - 1) if tier else room, (room,))


def tabled(tiers: Sequence[Store], steps: int) -> Tabled:
    """An optimal schedule. Takes time with the square of the steps, times the carries that all tiers can hold."""
    tables: list[tuple[_Table, ...]] = []
    wholes: list[Integers] = []
    best: Floats = np.full(steps + 1, np.inf)
    for tier, store in enumerate(tiers):
        found: list[_Table] = []
        for room in range(1 if store.rooms >= steps else store.rooms):
            rests = best if store.blocks is None else np.where(np.arange(steps + 1) <= store.blocks[room], 0.0, np.inf)
            found.append(_tabled(store, rests, found[-1].costs if found else None))
        mine = found[-1].costs + store.write
        wholes.append(np.where(mine < best, tier, wholes[-1] if wholes else tier))
        best = np.minimum(best, mine)
        tables.append(tuple(found))
    tier, extra = int(wholes[-1][steps]), best[steps].item()
    root = _piece(steps, tier, tiers[tier].rooms - 1)
    return Tabled(tuple(tiers), tuple(tables), tuple(wholes), root, int(extra) if len(tiers) == 1 else extra)


def _tabled(store: Store, rests: Floats, below: Floats | None) -> _Table:
    """The table of one room, from the costs in the room below it; a tier without a limit looks at its own."""
    costs, stops = rests.copy(), np.zeros(len(rests), dtype=np.int64)
    costs[0] = 0.0
    behind = rests.copy() if below is None else np.minimum(rests, below + store.write)
    swept = np.arange(len(rests)) + store.read
    for length in range(2, len(rests)):
        if store.rooms >= len(rests) - 1:
            behind[length - 1] = min(rests[length - 1], costs[length - 1] + store.write)
        stopped = swept[1:length] + costs[1:length] + behind[length - 1 : 0 : -1]
        at = int(stopped.argmin())
        if stopped[at] < costs[length]:
            costs[length], stops[length] = stopped[at], at + 1
    return _Table(costs, stops, rests)
