"""What a schedule is asked for: steps, segments, sizes, costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from reroll.errors import OptionError
from reroll.schedules.machine import MachineTier

_LARGEST = 1 << 50


@dataclass(frozen=True, slots=True)
class Problem:
    """What a schedule may know of a recurrence, in steps and bytes.

    ``steps`` T, in segments of ``segment`` steps, of which only the last may be short: intervals hold whole segments.
    ``carry``: bytes of a carry as it is kept. ``tape``: bytes of the tape of a segment. ``memory``: local bytes for
    kept carries and tapes at a time (None: no budget was given). ``chunk`` and ``slots``: as asked for, or as planned
    (None: not asked for, and the schedule has no plan for them). ``tier``: where remote carries go, of which it has
    ``room`` for so many (None: for all); to ``write`` or to ``read`` one takes as long as so many runs of a segment.
    Raises OptionError for numbers that make no sense, and for steps that are not known.
    """

    steps: int
    segment: int = 1
    carry: int = 1
    tape: int = 1
    memory: int | None = None
    chunk: int | None = None
    slots: int | None = None
    tier: str = "local"
    room: int | None = None
    write: float = 0.0
    read: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no number of anything."""
        if self.steps is None:
            raise OptionError(
                "A schedule was asked for steps=None, but a plan needs their number. Give steps; while it is not "
                "known, reroll.schedules.Online says which carries to keep."
            )
        for name in ("steps", "segment", "carry", "tape", "chunk", "slots"):
            number = getattr(self, name)
            optional = number is None and name in ("chunk", "slots")
            if not optional and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise OptionError(f"A plan was asked for {name}={number!r}, but it must be a whole number, 1 or more.")
            if number is not None and number > _LARGEST:
                raise OptionError(f"A plan was asked for {name}={number:.3g}, but no number may be above 2**50.")

    @property
    def segments(self) -> int:
        """How many segments the steps make, the short one included."""
        return -(-self.steps // self.segment)

    def whole(self, steps: int) -> int:
        """How many steps the segments hold that so many steps need: chunks are whole segments."""
        return min(-(-steps // self.segment) * self.segment, self.steps)

    def moving(self, tier: MachineTier, run_seconds: float) -> Self:
        """The problem with the room of a tier and what it costs to move a carry, where a segment runs so long."""
        room = None if tier.capacity is None else tier.capacity // self.carry
        seconds, run = (tier.write_seconds(self.carry), tier.read_seconds(self.carry)), max(run_seconds, 1e-9)
        return replace(self, tier=tier.name, room=room, write=seconds[0] / run, read=seconds[1] / run)
