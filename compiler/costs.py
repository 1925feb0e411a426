"""Seconds that the instructions of a training program take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reroll.machine import Machine


@dataclass(frozen=True, slots=True)
class SegmentSeconds:
    """Seconds of one segment: run forward without keeping its tape, run forward with it, and reversed."""

    forward: float
    tape: float
    backward: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of segments by their length in steps, and the machine on which they were taken.

    ``overlapped``: transfers run beside the segments (two streams); else they block, as in the paper
    (arXiv 2412.11810).
    """

    segments: Mapping[int, SegmentSeconds]
    machine: Machine
    overlapped: bool = False
