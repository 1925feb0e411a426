"""Seconds that the instructions of a training program take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from reroll.errors import MachineError
from reroll.schedules.machine import Machine


@dataclass(frozen=True, slots=True)
class SegmentSeconds:
    """Seconds of one segment: run forward without keeping its tape, run forward with it, and reversed.

    Raises MachineError for seconds that are negative, infinite or not a number.
    """

    forward: float
    tape: float
    backward: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise MachineError(
                    f"A segment has {name}={value!r} seconds, but seconds are finite and not negative. "
                    "Measure the segment again, or correct what was given."
                )


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of segments by their length in steps, and the machine on which they were taken.

    ``overlapped``: transfers run beside the segments (two streams); else they block, as in the paper
    (arXiv 2412.11810).
    """

    segments: Mapping[int, SegmentSeconds]
    machine: Machine
    overlapped: bool = False

    def __post_init__(self) -> None:
        for length, seconds in self.segments.items():
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise MachineError(f"A segment has {length!r} steps, but it must have a whole number of at least 1.")
            if not isinstance(seconds, SegmentSeconds):
                raise MachineError(f"The segment of {length} steps takes {seconds!r}. Give SegmentSeconds.")

    def of(self, length: int) -> SegmentSeconds:
        """The seconds of a segment of ``length`` steps. Raises MachineError if they are not known."""
        if length not in self.segments:
            known = ", ".join(map(str, sorted(self.segments))) or "none"
            raise MachineError(f"The seconds of a segment of {length} steps are not known; known lengths are {known}.")
        return self.segments[length]

    def numbers(self, length: int, tier: str | None = None) -> dict[str, float]:
        """What formulas (``reroll.schedules.formulas``) ask of segments of ``length`` steps and of a remote tier."""
        each = self.of(length)
        found = {"segment": length, "forward": each.forward, "taping": each.tape, "backward": each.backward}
        if tier is None:
            return found
        place = self.machine.tier(tier)
        return {**found, "write": place.write, "read": place.read, "latency": place.latency}
