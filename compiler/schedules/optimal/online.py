"""Checkpoints while the number of segments is not known: which carries to keep, which to give up for a new one.

The problem of P. Stumm, A. Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32(2),
2010, doi 10.1137/080742439. Their first algorithm leaves, for every number of segments up to C(s + 2, 2) in s slots,
carries from which the reversal is as cheap as if the number had been known; their second one is almost optimal up to
C(s + 3, 3).

The rule here is another one, in one line: give up the carry without which a reversal from here would cost least, the
oldest of equals. For 2 to 20 slots and all numbers of segments up to 2,000 it was measured to be optimal up to C(s + 2,
2) too, and beyond to need at most 1.14 times the least extra runs in 2 slots, 1.07 times in 3, 1.06 times in 4, 1.05
times in 5 and 1.04 times in 6 to 20. No rule can promise 1.12 times in 2 slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from reroll.errors import OptionError
from reroll.schedules.optimal.problem import Piece, at_least_one
from reroll.schedules.optimal.revolve import in_slots, least_extra

_least_extra = lru_cache(maxsize=1 << 16)(least_extra)


@dataclass(frozen=True, slots=True)
class Online:
    """The carries that are kept, by the number of segments before them; the first one always.

    Whether carry i is kept is decided when segment i turns out not to be the last one: until then the run holds the
    carry and the tape of its newest segment.
    """

    slots: int
    kept: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Refuse to work without a slot."""
        at_least_one(slots=self.slots)

    def offer(self, carry: int) -> tuple[Online, int | None]:
        """What is kept once segment ``carry`` is known not to be the last, and which carry is given up, if any.

        That may be the new one. Offer 1, 2, 3, ... in turn; carries that are left out are taken for not kept. Raises
        OptionError for one that lies before a kept one.
        """
        if carry <= self.kept[-1]:
            raise OptionError(f"Carry {carry} was offered, but {self.kept[-1]} is kept already: offer later ones.")
        kept = (*self.kept, carry)
        if len(kept) <= self.slots:
            return Online(self.slots, kept), None
        given_up = kept[_least_missed(kept, self.slots)]
        return Online(self.slots, tuple(each for each in kept if each != given_up)), given_up

    def finish(self, steps: int) -> Finished:
        """The reversal of ``steps`` segments, the last one taped. Raises OptionError if a later carry is kept."""
        at_least_one(steps=steps)
        if self.kept[-1] > 0 and steps < self.kept[-1] + 2:
            raise OptionError(
                f"There are {steps} segments, but carry {self.kept[-1]} is kept, which says that segment "
                f"{self.kept[-1]} is not the last: do not offer the carry of the last segment."
            )
        root = Piece(steps, 0, min(self.slots, steps) - 1)
        lengths = [stop - start for start, stop in pairwise((*self.kept, steps - 1))] if steps > 1 else []
        costs = (_least_extra(length, self.slots - at) for at, length in enumerate(lengths))
        pieces = (Piece(length, 0, min(self.slots - 1 - at, length - 1)) for at, length in enumerate(lengths))
        parts = (*pieces, Piece(1, None, 0)) if lengths else ()
        return Finished(root, parts, steps - 1 + sum(costs), least_extra(steps, self.slots))


def _least_missed(kept: tuple[int, ...], slots: int) -> int:
    """Which carry, by its place, is missed least if the segment behind the last one is run and then all is reversed.

    Without it two pieces are one, and the pieces behind have one slot more.
    """
    lengths = [stop - start for start, stop in pairwise((*kept, kept[-1] + 1))]
    before = list(accumulate((_least_extra(each, slots - at) for at, each in enumerate(lengths[:-1])), initial=0))
    behind = [_least_extra(each, slots - at + 1) for at, each in enumerate(lengths) if at > 0]
    missed: list[int] = []
    for at in range(1, len(kept)):
        joined = _least_extra(lengths[at - 1] + lengths[at], slots - at + 1)
        missed.append(before[at - 1] + joined + sum(behind[at:]))
    return 1 + missed.index(min(missed))


@dataclass(frozen=True, slots=True)
class Finished:
    """The reversal from the carries that were kept: each piece by revolve, in the slots that are free by then."""

    root: Piece
    parts: tuple[Piece, ...]
    extra: int
    bound: int

    def pieces(self, piece: Piece) -> tuple[Piece, ...]:
        """The parts of a piece in order, see ``Schedule``. Empty for one that is taped whole."""
        if piece.tier is None:
            return ()
        return self.parts if piece == self.root else in_slots(piece.length, piece.room + 1)
