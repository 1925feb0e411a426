"""Two tiers of slots, exactly: H-Revolve's problem with two levels, for any number of segments.

Sources: J. Herrmann, G. Pallez, "H-Revolve", ACM TOMS 46(2), 2020, doi 10.1145/3378672; G. Aupy, J. Herrmann, P.
Hovland, Y. Robert, "Optimal multistage algorithm for adjoint computation", SIAM J. Sci. Comput. 38(3), 2016, doi
10.1137/15M1019222. They find the optimum by a recurrence over all lengths (it is in ``tabled``). Here it is put
together from what their schedules are made of: carries in the slow tier cut the segments into pieces that the fast tier
reverses alone.

A piece of p segments that had k extra runs costs k p + E(p), with revolve's least cost E in the fast slots. One piece,
the last, has k = 0. Each time that the run from a slow carry is made again (a read) it cuts off one piece more, one
extra run later than that carry's piece before. A slow carry costs a write, the first carry too, and its slot is free
again when its own piece is reversed. In c slow slots C(c + k - 1, k) pieces can have k extra runs, as in revolve; the
carries whose first piece has k are as many as that number is larger than the one for k - 1. So the number of writes
says how many pieces there can be with 0, 1, 2, ... extra runs, and with the n that have the fewest of them

    cost(writes, n) = writes * write + (n - 1) * read + min over lengths of the sum of k_i p_i + E(p_i)

where the minimum takes segments in the order of the slopes of k p + E(p), whole numbers, so that it is a sum of
binomials. This is convex in n. Over the writes a convex function bounds it from below, what segments cost at a price
(``priced``), so that few numbers of writes need a look: some ten milliseconds for 100,000 segments.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from reroll.schedules.optimal.problem import LocalSlots, Piece, SlowTier, at_least_one
from reroll.schedules.optimal.revolve import in_slots, least_extra, reach, reach_sum


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """An optimal schedule. ``fast``: slots of tier 0; ``slow``: pieces of tier 1 that are cut in tier 1 again."""

    root: Piece
    extra: float
    fast: int
    slow: dict[Piece, tuple[Piece, ...]] = field(repr=False)

    @property
    def bound(self) -> float:
        """The schedule is optimal."""
        return self.extra

    def pieces(self, piece: Piece) -> tuple[Piece, ...]:
        """The parts of a piece in order, see ``Schedule``. Empty for one that is taped whole."""
        if piece.tier is None:
            return ()
        return self.slow.get(piece) or in_slots(piece.length, self.fast if piece.tier else piece.room + 1)


def two_level(steps: int, fast: LocalSlots, slow: SlowTier) -> TwoLevel:
    """An optimal schedule for ``steps`` segments, over ``fast`` slots that are free and a slow tier.

    A carry that was read is held in a fast slot while its piece is reversed, and so is the first one if nothing is
    written. Costs that are whole numbers are added exactly. Raises OptionError.
    """
    at_least_one(steps=steps)
    slots = steps if slow.slots is None else min(slow.slots, steps)
    problem = _Problem(steps, fast.slots, slots, slow.write, slow.read)
    extra, writes, pieces = problem.best()
    if pieces == 1:
        return TwoLevel(Piece(steps, 0, min(fast.slots, steps) - 1), extra, fast.slots, {})
    return _Builder(problem, problem.counts(writes, pieces)).schedule(extra)


def _first(test: Callable[[int], bool], low: int) -> int:
    """The first number, not below ``low``, from which on the test holds. Looks twice as far each time."""
    step = 1
    while not test(low + step - 1):
        low, step = low + step, 2 * step
    return low + bisect_left(range(low, low + step - 1), True, key=test)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Segments, slots of both tiers, and what a carry costs in the slow one."""

    steps: int
    fast: int
    slow: int
    write: float
    read: float

    def best(self) -> tuple[float, int, int]:
        """The least cost, with its number of writes and of pieces."""
        best: tuple[float, int, int] = (least_extra(self.steps, self.fast), 0, 1)
        if self.slow == 0:
            return best
        middle = _first(lambda writes: self.bound(writes + 1) >= self.bound(writes), 1)
        for side in (range(middle, self.steps), range(middle - 1, 0, -1)):
            for writes in side:
                if self.bound(writes) >= best[0]:
                    break
                pieces = self.pieces(writes)
                best = min(best, (self.cost(writes, pieces), writes, pieces))
        return best

    def pieces(self, writes: int) -> int:
        """The best number of pieces for so many writes: each one up to it pays for its read."""
        return _first(lambda pieces: self.cost(writes, pieces + 1) >= self.cost(writes, pieces), writes + 1)

    def available(self, writes: int) -> Iterator[int]:
        """How many pieces can have 1, 2, 3, ... extra runs: C(c + k - 1, k), and no more than before without writes."""
        pieces = 0
        for runs in count(1):
            new = min(math.comb(self.slow + runs - 1, runs) - pieces, writes) if writes else 0
            pieces, writes = pieces + new, writes - new
            yield pieces

    def counts(self, writes: int, pieces: int) -> list[int]:
        """How many of the first pieces have 0, 1, 2, ... extra runs."""
        found, available = [1], self.available(writes)
        while pieces > sum(found):
            found.append(min(next(available), pieces - sum(found)))
        return found

    def cost(self, writes: int, pieces: int) -> float:
        """The least cost with so many writes and pieces."""
        counts = self.counts(writes, pieces)
        price = self.price(counts)
        earned = sum(n * reach_sum(self.fast, price - 1 - runs) for runs, n in enumerate(counts))
        return writes * self.write + (pieces - 1) * self.read + price * self.steps - earned

    def price(self, counts: list[int]) -> int:
        """The largest slope that is needed if so many pieces with 0, 1, 2, ... extra runs hold all segments."""

        def enough(price: int) -> bool:
            return sum(n * reach(self.fast, price - runs) for runs, n in enumerate(counts)) >= self.steps

        return _first(enough, 0)

    def bound(self, writes: int) -> float:
        """No schedule with so many writes costs less: the most that a price for each segment proves. Convex in writes.

        At a price all pieces are taken that earn more than a read. What is left to pay is concave in the price, with
        corners at whole prices and where pieces begin to earn their read, which is at equal distances.
        """
        runs = _first(lambda runs: reach_sum(self.fast, runs) > self.read, 0)
        corner = (self.read - reach_sum(self.fast, runs - 1)) / reach(self.fast, runs)

        def proved(price: int, part: float) -> float:
            left = (price + part) * self.steps + writes * self.write - self._earns(price, part)
            for k, pieces in enumerate(self.available(writes), 1):
                gain = self._earns(price - k, part) - self.read
                if gain <= 0:
                    break
                left -= pieces * gain
            return left

        best = _first(lambda price: proved(price + 1, 0.0) <= proved(price, 0.0), 0)
        return max(proved(best, 0.0), proved(best, corner), proved(best - 1, corner))

    def _earns(self, price: int, part: float) -> float:
        """What a piece without extra runs earns at a price of ``price + part``: the sum of price minus slope."""
        return reach_sum(self.fast, price - 1) + part * reach(self.fast, price)


class _Builder:
    """Puts a schedule together from how many of its pieces have 0, 1, 2, ... extra runs.

    Of the pieces with k of them, ``again`` are cut off by a carry that cut off one with k - 1 before, ``new`` by one
    that is new. Of the segments with the largest slope, ``empty`` pieces that have no other need one each, the
    ``spare`` ones go to the others as they come.
    """

    def __init__(self, problem: _Problem, counts: list[int]) -> None:
        self.problem = problem
        self.price = problem.price(counts)
        self.again = [0, 0, *map(min, counts[1:], counts[2:]), 0]
        self.new = [*(n - again for n, again in zip(counts, self.again, strict=False)), 0]
        self.empty = counts[self.price] if self.price < len(counts) else 0
        self.spare = problem.steps - self.empty - sum(n * self._least(runs) for runs, n in enumerate(counts))
        self.slow: dict[Piece, tuple[Piece, ...]] = {}

    def schedule(self, extra: float) -> TwoLevel:
        """The schedule of all segments, the first carry in the slow tier."""
        return TwoLevel(self._kept(self._after_carry(0, self.problem.slow)), extra, self.problem.fast, self.slow)

    def _least(self, runs: int) -> int:
        """The segments of a piece with so many extra runs that have less than the largest slope."""
        return reach(self.problem.fast, self.price - 1 - runs)

    def _length(self, runs: int) -> int:
        """The length of the next piece with so many extra runs."""
        if runs == self.price and self.empty:
            self.empty -= 1
            return 1
        least = self._least(runs)
        more = min(reach(self.problem.fast, self.price - runs) - least, self.spare)
        self.spare -= more
        return least + more

    def _piece(self, runs: int, free: int) -> Piece:
        """What is reversed from a slow carry, after so many extra runs, with so many slow slots free."""
        if not self.again[runs + 1]:
            return Piece(self._length(runs), 1, 0)
        self.again[runs + 1] -= 1
        return self._kept([self._piece(runs + 1, free), *self._after_carry(runs, free)])

    def _after_carry(self, runs: int, free: int) -> list[Piece]:
        """Behind the part of a run's own carry: pieces of new slow carries, then one that is reversed at once."""
        found = []
        while self.new[runs + 1] and free:
            self.new[runs + 1] -= 1
            free -= 1
            found.append(self._piece(runs + 1, free))
        length = self._length(runs)
        return [*found, *(in_slots(length, self.problem.fast) or [Piece(length, None, 0)])]

    def _kept(self, found: list[Piece]) -> Piece:
        """The piece that is made of these; its room is the number of further slow carries that it keeps at a time."""
        found = [part for part in found if part.length]
        room = max(at + part.room for at, part in enumerate(found) if part.tier == 1)
        piece = Piece(sum(part.length for part in found), 1, room)
        self.slow.setdefault(piece, tuple(found))
        return piece
