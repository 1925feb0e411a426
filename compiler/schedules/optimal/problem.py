"""The problem of optimal checkpoints: segments to be reversed, the memory for it, and what a schedule of it says.

``steps`` equal segments are to be reversed, the last first. A run of a segment costs 1, whether it tapes it or not.
Each segment has one run that tapes it, right before its backward; that run is not counted, all others are ``extra``.
Memory holds carries (a restart of the forward) and tapes (what one backward needs); the carry that runs is free.

In slots the problem is that of A. Griewank and A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000, doi
10.1145/347837.347846, and with slower tiers that of J. Herrmann and G. Pallez, "H-Revolve", ACM TOMS 46(2), 2020, doi
10.1145/3378672. In bytes, where tapes of several segments share the memory with carries, it is stated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reroll.errors import BudgetError, OptionError

Integers = NDArray[np.int64]
Numbers = NDArray[Any]
"""Costs: integers where all costs are, else floats."""


@dataclass(frozen=True, slots=True)
class OneTier:
    """Memory that holds carries of ``carry`` units and tapes of segments of ``tape`` units, in any mixture.

    ``memory`` units are free beside the first carry. Raises OptionError for sizes below one, BudgetError if not one
    segment can be taped.
    """

    carry: int
    tape: int
    memory: int

    def __post_init__(self) -> None:
        """Refuse sizes with which nothing can be reversed."""
        at_least_one(carry=self.carry, tape=self.tape)
        if self.memory < self.tape:
            refusal = BudgetError(
                f"{self.memory} units beside the first carry do not hold the tape of one segment, {self.tape} units. "
                "Give more memory, or shorter segments."
            )
            refusal.nbytes = self.tape
            raise refusal

    def blocks(self, most: int) -> Integers:
        """Segments that can be taped at once where 0, 1, 2, ... further carries could be kept instead.

        The last one is that beside the first carry alone; ``most`` are given, those with most memory.
        """
        carries = np.arange(min(self.memory // self.carry, most - 1), -1, -1, dtype=np.int64)
        blocks = (self.memory - self.carry * carries) // self.tape
        return blocks[blocks > 0]  # where no tape fits, nothing can be reversed


@dataclass(frozen=True, slots=True)
class LocalSlots:
    """Slots for ``slots`` carries, one of which holds the first; a tape of one segment is free. Raises OptionError."""

    slots: int

    def __post_init__(self) -> None:
        """Refuse to work without a slot."""
        at_least_one(slots=self.slots)

    def blocks(self, most: int) -> Integers:
        """Segments that can be taped at once where 0, 1, 2, ... further carries could be kept: always one."""
        return np.ones(min(self.slots, most), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SlowTier:
    """A slower tier for ``slots`` carries (None: as many as are wanted); a write and a read of one cost so many runs.

    Raises OptionError for what is no number of slots or no cost.
    """

    slots: int | None
    write: float
    read: float

    def __post_init__(self) -> None:
        """Refuse what is no cost."""
        if self.slots is not None and self.slots < 0:
            raise OptionError(f"A tier has slots={self.slots}, but slots must be at least 0, or None for no limit.")
        for name, cost in (("write", self.write), ("read", self.read)):
            if not 0 <= cost < math.inf:
                raise OptionError(f"A tier has {name}={cost}, but {name} must be a finite cost of at least 0.")


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` segments in a row, reversed from a carry that is kept in ``tier``: 0 is the fast one, 1 a slower one.

    ``room`` further carries can be kept in that tier meanwhile, all faster tiers are free. The tier None says that no
    carry is kept: the run that comes to the piece goes on and tapes it. ``where`` is the schedule's own: pieces that
    differ by it alone are the same problem, so the parts of one may stand for those of the other.
    """

    length: int
    tier: int | None
    room: int
    where: tuple[int, ...] = field(default=(), compare=False, repr=False)


class Schedule(Protocol):
    """How ``root`` is reversed."""

    @property
    def extra(self) -> float:
        """What it costs: extra runs and transfers, in runs. An int if there are no slow tiers."""

    @property
    def bound(self) -> float:
        """What any schedule costs at least. Equal to ``extra`` if this one is proved to be optimal."""

    @property
    def root(self) -> Piece:
        """All segments, and where the first carry is kept."""

    def pieces(self, piece: Piece) -> tuple[Piece, ...]:
        """What ``piece`` is made of, in order: the run over it keeps the carry at the start of each part.

        The parts are reversed last to first. The first one shares the carry of ``piece`` if it is in the same tier; if
        not, that carry, which is in hand, is kept in the first part's tier too. Empty for a piece that is taped whole.
        """


def gap(schedule: Schedule) -> float:
    """By how many runs at most the schedule costs more than an optimal one. 0: it is proved to be optimal."""
    return schedule.extra - schedule.bound


def at_least_one(**numbers: int) -> None:
    """Raise OptionError for a number below one."""
    for name, number in numbers.items():
        if number < 1:
            raise OptionError(f"A reversal has {name}={number}, but {name} must be at least 1.")


@dataclass(frozen=True, slots=True)
class Store:
    """A tier as its rooms 0, 1, ...: further carries that it can hold beside that of the piece which is reversed.

    ``blocks`` by room: segments that can be taped at once. None for a slow tier: faster ones reverse its pieces.
    """

    rooms: int
    write: float = 0
    read: float = 0
    blocks: Integers | None = None


def stores(steps: int, fast: OneTier | LocalSlots, slow: Sequence[SlowTier] = ()) -> tuple[Store, ...]:
    """The tiers that can serve a reversal of ``steps`` segments, the fast one first."""
    at_least_one(steps=steps)
    blocks = fast.blocks(steps)
    # Rooms below those that one run over all segments can fill are of no use.
    blocks = blocks[-1 - int(np.searchsorted(np.cumsum(blocks[::-1]), steps)) :]
    limited = ((tier, steps if tier.slots is None else min(tier.slots, steps)) for tier in slow)
    slower = (Store(slots, tier.write, tier.read) for tier, slots in limited if slots > 0)
    return (Store(len(blocks), blocks=blocks), *slower)
