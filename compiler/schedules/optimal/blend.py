"""Schedules of any length, between two trees of a price.

The trees of ``priced`` are optimal for their own lengths. A schedule of a length in between has pieces as in the
shorter tree, behind them pieces as in the longer one, and one piece that is itself in between. What it costs more than
the line between the two trees is its gap.

That pieces in between are good ones is proved for slots alone: there each segment more costs the same number of runs
more, from the shorter of the two lengths to the longer one (Griewank and Walther 2000, doi 10.1145/347837.347846;
``revolve.parts``). In bytes and with slow tiers it is a way to find a schedule, and the bound, which holds for all
schedules, says how far from an optimal one it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reroll.schedules.optimal.priced import Cut, Trees, bracket
from reroll.schedules.optimal.problem import Integers, Numbers, Piece, Store
from reroll.schedules.optimal.revolve import spread


@dataclass(frozen=True, slots=True)
class _Group:
    """Parts in one tier, in order, with the further carries that each can keep and the extra runs that each had."""

    tier: int
    lengths: Integers
    rooms: Integers
    runs: int

    def pieces(self, which: Iterable[int]) -> Iterator[Piece]:
        """These of the parts."""
        return (_piece(int(self.lengths[at]), self.tier, int(self.rooms[at]), self.runs) for at in which)


@dataclass(frozen=True, slots=True)
class Blend:
    """A schedule whose pieces are as in ``low``, as in ``high`` or, one on each way down the tree, in between."""

    tiers: tuple[Store, ...]
    low: Trees
    high: Trees
    root: Piece
    extra: float = 0
    bound: float = 0

    def pieces(self, piece: Piece) -> tuple[Piece, ...]:
        """The parts of a piece in order, see ``Schedule``. Empty for one that is taped whole."""
        if piece.tier is None:
            return ()
        groups, rest = self._first_run(piece)
        found = [part for group in groups for part in group.pieces(range(len(group.lengths)))]
        return (*found, Piece(rest, None, 0)) if found else ()

    def cost(self) -> float:
        """What the schedule costs, in runs. Subtrees that are as in one of the two trees are not looked into."""
        cost, waiting = self.tiers[self.root.tier or 0].write, [self.root]
        while waiting:
            piece = waiting.pop()
            for group in self._first_run(piece)[0]:
                tier, shared = self.tiers[group.tier], group.tier == piece.tier
                costs, known = self._known(group)
                moves = len(costs) * (tier.read + tier.write) - (tier.write if shared else 0)
                cost += int(group.lengths.sum()) + moves + costs[known].sum().item()
                waiting += group.pieces(np.flatnonzero(~known).tolist())
        return cost

    def _known(self, group: _Group) -> tuple[Numbers, NDArray[np.bool_]]:
        """The costs of the parts that are as in one of the two trees, and which of them are."""
        costs: Numbers = np.zeros(len(group.lengths), dtype=np.int64)
        known = np.zeros(len(group.lengths), dtype=np.bool_)
        for trees in (self.low, self.high):
            row = trees.row(group.tier, group.runs)
            if row is not None:
                same = row.length[group.rooms] == group.lengths
                costs = np.where(same, row.cost[group.rooms], costs)
                known |= same
        return costs, known

    def _first_run(self, piece: Piece) -> tuple[list[_Group], int]:
        """What the first run over a piece keeps, tier by tier, and how much is left to be taped behind that."""
        groups: list[_Group] = []
        tier, rest, (room, runs) = piece.tier, piece.length, piece.where
        while tier is not None:
            lengths, rest = self._cut(tier, room, runs, rest)
            if len(lengths):
                groups.append(_Group(tier, lengths, room - np.arange(len(lengths)), runs + 1))
            # What is left goes to the faster tier that is best for it in the longer tree; None: it is taped.
            whole = self.high.whole(tier - 1, runs)
            tier = whole.tier if whole else tier - 1 if tier else None
            room = 0 if tier is None else self.tiers[tier].rooms - 1
        return groups, rest

    def _cut(self, tier: int, room: int, runs: int, length: int) -> tuple[Integers, int]:
        """The lengths of the parts in this tier, and how much is left to faster tiers, or to be taped.

        As many parts as the lower tree has, and as few more, up to those of the higher one, as have the length in them.
        """
        low, high = (trees.cut(tier, room, runs) for trees in (self.low, self.high))
        if length <= low.length:
            high = low
        elif length >= high.length or len(low.parts) > len(high.parts):
            low = high
        # reached[n]: the most segments with n parts, each as long as in the longer tree, and what they leave.
        rests = self._rests(tier, room, high)
        reached = np.append(0, np.cumsum(high.parts)) + rests
        enough = np.flatnonzero(reached[len(low.parts) :] >= length)
        count = len(low.parts) + int(enough[0]) if len(enough) else len(high.parts)
        rest = int(rests[count])
        if count == 0 and rest < length:
            return np.array([] if tier else [length - rest], dtype=np.int64), length if tier else rest
        # In the fast tier what is left is taped by the run that comes there, without an extra run: as much as can be.
        lows = np.zeros(count + 1, dtype=np.int64)
        lows[: len(low.parts)] = low.parts
        lows[-1] = low.rest if tier else rest
        lengths = spread(lows, np.append(high.parts[:count], rest), length)
        return lengths[:-1][lengths[:-1] > 0], int(lengths[-1])

    def _rests(self, tier: int, room: int, cut: Cut) -> Integers:
        """What is left behind 0, 1, 2, ... parts: the more carries the fast tier holds, the less can be taped."""
        blocks = self.tiers[tier].blocks
        if blocks is None:
            return np.full(len(cut.parts) + 1, cut.rest)
        return np.append(blocks[room], blocks[room::-1])[: len(cut.parts) + 1]


def _piece(length: int, tier: int, room: int, runs: int) -> Piece:
    """A piece. In a slow tier it is said to have no more room than there are places in it for a carry."""
    return Piece(length, tier, min(room, length - 1) if tier else room, (room, runs))


def blend(tiers: tuple[Store, ...], steps: int) -> Blend:
    """The best of three: between the trees beside a length, the shorter one lengthened, the longer one shortened."""
    blocks = tiers[0].blocks
    assert blocks is not None
    if len(tiers) == 1 and len(blocks) == 1:
        return _single(tiers, steps, int(blocks[0]))
    # Where a corner is within one tape of the length, it alone, made longer or shorter, may cost less than the blend.
    found = bracket(tiers, steps)
    low, high = found.low, found.high
    pairs = [(low, high)]
    if low.rows and steps - low.length <= blocks[-1]:
        pairs.append((low, low))
    if high.length - steps <= blocks[-1]:
        pairs.append((high, high))
    blends = []
    for shorter, longer in pairs:
        tier = longer.wholes[-1][-1].tier
        root = _piece(steps, tier, tiers[tier].rooms - 1, 0)
        each = Blend(tiers, shorter, longer, root, bound=found.bound)
        blends.append(replace(each, extra=each.cost()))
    return min(blends, key=lambda each: each.extra)


def _single(tiers: tuple[Store, ...], steps: int, block: int) -> Blend:
    """Where no further carry can be kept block after block is taped: sum over k >= 1 of max(0, steps - k block)."""
    runs = (steps - 1) // block  # the k-th stops before the last k blocks: it tapes one, the others were reversed
    extra = runs * steps - block * runs * (runs + 1) // 2
    nothing = Trees(0, (), ())
    return Blend(tiers, nothing, nothing, _piece(steps, 0, 0, 0), extra, extra)
