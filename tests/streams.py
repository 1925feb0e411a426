"""How long a program takes where one stream computes, one writes and one reads: an oracle for formulas of time."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from reroll.instructions import RUNS
from reroll.program import Node, Program, backward, offload, reload, tape


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
    written: dict[Node, float] = field(default_factory=dict)
    there: dict[Node, float] = field(default_factory=dict)


def makespan(program: Program, seconds: Seconds, *, overlapped: bool) -> float:
    """Seconds until the last gradient. Blocking: every instruction waits for the one before it."""
    streams = Streams()
    for node in program.graph.nodes:
        args: Any = node.args
        if node.target in RUNS:
            streams.compute = max(streams.compute, streams.there.get(args[0], 0.0))
            each = seconds.taping if node.target is tape else seconds.forward
            streams.compute += -(-(args[2] - args[1]) // program.segment) * each
        elif node.target is backward:
            steps = args[0].args[2] - args[0].args[1]
            streams.compute += -(-steps // program.segment) * seconds.backward
        elif node.target is offload:
            streams.writing = max(streams.writing, streams.compute) + _transfer(len(args[0]), seconds.write, seconds)
            streams.written[node] = streams.writing
        elif node.target is reload:
            # Every write is behind it where the first block read is the last one written, as it is in all schemes.
            start = max(streams.reading, streams.compute, streams.written[args[0]])
            streams.reading = start + _transfer(len(args[0].args[0]), seconds.read, seconds)
            streams.there[node] = streams.reading
        elif node.target is operator.getitem:
            streams.there[node] = streams.there[args[0]]
        if not overlapped:
            streams.compute = max(streams.compute, streams.writing, streams.reading)
    return streams.compute


def _transfer(carries: int, rate: float, seconds: Seconds) -> float:
    return seconds.latency + carries * seconds.packed / rate
