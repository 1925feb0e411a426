"""How long a program takes where one stream computes, one writes and one reads: an oracle for formulas of time."""

from __future__ import annotations

from dataclasses import dataclass, field

from reroll.program.program import Program
from reroll.program.spelled import RUN_KINDS, spelled_out


@dataclass(frozen=True)
class Seconds:
    """Of segments and transfers, and the bytes of a carry in a block."""

    forward: float
    taping: float
    backward: float
    write: float
    read: float
    latency: float
    packed: float


@dataclass
class Streams:
    """The time at which each stream is free, and at which blocks are written and carries are there."""

    compute: float = 0.0
    writing: float = 0.0
    reading: float = 0.0
    written: dict[int, float] = field(default_factory=dict)
    there: dict[int, float] = field(default_factory=dict)


def makespan(program: Program, seconds: Seconds, *, overlapped: bool) -> float:
    """Seconds until the last gradient. Blocking: every instruction waits for the one before it."""
    streams = Streams()
    played = list(spelled_out(program))
    for number, each in enumerate(played):
        segments = -(-(each.stop - each.start) // program.segment)
        source = each.reads[0] if each.reads else 0
        if each.kind in RUN_KINDS:
            streams.compute = max(streams.compute, streams.there.get(source, 0.0))
            streams.compute += segments * (seconds.taping if each.kind == "tape" else seconds.forward)
        elif each.kind == "backward":
            streams.compute += segments * seconds.backward
        elif each.kind == "offload":
            streams.writing = max(streams.writing, streams.compute) + _transfer(len(each.reads), seconds.write, seconds)
            streams.written[number] = streams.writing
        elif each.kind == "reload":
            # Every write is behind it where the first block read is the last one written, as it is in all schemes.
            start = max(streams.reading, streams.compute, streams.written[source])
            streams.reading = start + _transfer(len(played[source].reads), seconds.read, seconds)
            streams.there[number] = streams.reading
        elif each.kind == "pick":
            streams.there[number] = streams.there[source]
        if not overlapped:
            streams.compute = max(streams.compute, streams.writing, streams.reading)
    return streams.compute


def _transfer(carries: int, rate: float, seconds: Seconds) -> float:
    return seconds.latency + carries * seconds.packed / rate
