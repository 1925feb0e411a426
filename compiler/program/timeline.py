"""A training program in time: what runs when, what every tier holds meanwhile, how often steps run again.

The local bytes of an instruction are those of ``reroll.program.memory``, so that the peak of a trace is the predicted
one. Two models of transfers (``Costs.overlapped``):

- blocking, that of Bencheikh, Finkbeiner, Neftci (2024), arXiv 2412.11810: a transfer stops compute, and the program
  takes the sum of its instructions;
- overlapped: each tier has a lane for writes and one for reads, which take one transfer after another. A write begins
  once its carries are made, a read once its block is written and the program asks for it; a segment waits for what it
  reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from reroll.errors import OptionError
from reroll.program.memory import Needs, memory
from reroll.program.program import Program
from reroll.program.spelled import RUN_KINDS, Played, spelled_out
from reroll.program.tally import Hold, holds
from reroll.schedules.machine import Costs, work_seconds

WORK = (*RUN_KINDS, "backward")
MOVES = {"offload": "write", "reload": "read"}


@dataclass(frozen=True, slots=True)
class Event:
    """``count`` instructions of one kind (one, unless summed up) on a track, over steps [start, stop).

    ``begin`` and ``end`` in seconds. ``track``: "compute", "write <tier>" or "read <tier>". ``again``: how often the
    steps had run before, at most. ``nbytes``: what a transfer moves.
    """

    track: str
    kind: str
    name: str
    start: int
    stop: int
    begin: float
    end: float
    again: int = 0
    nbytes: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Stay:
    """The carry at ``step`` kept in a tier, from ``begin`` to ``end`` in seconds."""

    tier: str
    step: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A program of ``steps`` steps in time; it takes ``seconds``, and turns at second ``turn``.

    Columns, one for each instruction: ``names``; ``times``, the seconds at which it begins; ``memory``, the bytes that
    each tier ("local" first) holds until the next one begins (after the last: none). ``depth``: how often a step runs
    again, at most. ``instructions`` counts them all, also where columns are summed up. ``nominal``: no costs are
    known, and a second stands for one forward step.
    """

    steps: int
    seconds: float
    turn: float
    depth: int
    nominal: bool
    instructions: int
    names: tuple[str, ...]
    times: tuple[float, ...]
    memory: Mapping[str, tuple[int, ...]] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    stays: tuple[Stay, ...] = field(repr=False)

    def peak(self, tier: str) -> int:
        """The most bytes that a tier holds."""
        return max(self.memory.get(tier, (0,)))

    def at_peak(self) -> str:
        """The instruction at which the local peak is reached first."""
        local = self.memory["local"]
        return self.names[local.index(max(local))]

    def tracks(self) -> tuple[str, ...]:
        """The tracks of the events, compute first."""
        return tuple(dict.fromkeys(["compute", *(event.track for event in self.events)]))


def trace(program: Program, needs: Needs, costs: Costs | None = None) -> Timeline:
    """Play a legal program in time. Linear in its instructions: about 20 us each.

    Without ``costs`` a forward step takes 1, a backward step 2, a transfer 0. Raises OptionError if the machine of the
    costs lacks a tier of the program, ValueError if the costs lack a length of its segments.
    """
    played = list(spelled_out(program))
    held, steps = list(holds(played, needs.sizes)), _steps(played)
    times, events, seconds = _play(program, played, held, steps, costs)
    ends = [*times, seconds]
    turn = next((time for time, each in zip(times, played, strict=True) if each.kind == "turn"), seconds)
    return Timeline(
        steps=program.steps,
        seconds=seconds,
        turn=turn,
        depth=max((event.again for event in events), default=0),
        nominal=costs is None,
        instructions=len(played),
        names=tuple(each.name for each in played),
        times=tuple(times),
        memory=memory(played, held, needs),
        events=tuple(events),
        stays=tuple(
            Stay(hold.tier, steps[hold.first][item], ends[hold.first], ends[hold.last + 1])
            for hold in held
            for item in hold.items
        ),
    )


def _steps(played: Sequence[Played]) -> Sequence[tuple[int, ...]]:
    """The steps of the carries that each instruction gives."""
    steps: list[tuple[int, ...]] = []
    for each in played:
        if each.kind in RUN_KINDS:
            steps.append((each.stop,))
        elif each.kind in ("backward", "turn", "output"):
            steps.append(())
        elif each.kind == "carry":
            steps.append((0,))
        else:
            read = tuple([step for source in each.reads for step in steps[source]])
            steps.append((read[each.item],) if each.kind == "pick" else read)
    return steps


def _play(
    program: Program,
    played: Sequence[Played],
    held: Sequence[Hold],
    steps: Sequence[tuple[int, ...]],
    costs: Costs | None,
) -> tuple[list[float], list[Event], float]:
    """When each instruction begins, the events, and when the last one ends."""
    runs = np.zeros(-(-program.steps // program.segment), dtype=np.int64)
    blocks = {hold.first: hold for hold in held if hold.tier != "local"}
    blocking = costs is None or not costs.overlapped
    work = cache(partial(work_seconds, costs.segments) if costs else _nominal)
    clock, lanes = 0.0, dict[str, float]()
    times: list[float] = []
    ready: list[float] = []  # when the value of each instruction is there
    events: list[Event] = []
    for number, each in enumerate(played):
        begin = max((ready[source] for source in each.reads), default=0.0)
        end = begin
        if each.kind in WORK:
            begin = clock = max(clock, begin)
            end = begin + work(each.kind, each.stop - each.start, each.thin)
            again = _again(each, runs, program.segment)
            events.append(Event("compute", each.kind, each.name, each.start, each.stop, begin, end, again))
        times.append(clock)
        if each.kind in MOVES:
            block = blocks[number if each.kind == "offload" else each.reads[0]]
            track, at = f"{MOVES[each.kind]} {block.tier}", steps[block.first][0]
            begin = max(begin, clock, lanes.get(track, 0.0))
            end = lanes[track] = begin + _move_seconds(costs, each.kind, block)
            events.append(Event(track, each.kind, each.name, at, at, begin, end, nbytes=block.units))
        if each.kind in WORK or (blocking and each.kind in MOVES):
            clock = end
        ready.append(end)
    return times, events, max([clock, *lanes.values()])


def _again(each: Played, runs: np.ndarray[tuple[int], np.dtype[np.int64]], segment: int) -> int:
    """How often the steps of a run had run before, at most; ``runs`` counts the runs of each segment."""
    if each.kind not in RUN_KINDS:
        return 0
    these = slice(each.start // segment, -(-each.stop // segment))
    before = int(runs[these].max())
    runs[these] += 1
    return before


def _nominal(kind: str, steps: int, _thin: bool) -> float:
    """Seconds of a run or a backward where no costs are known."""
    return 2.0 * steps if kind == "backward" else float(steps)


def _move_seconds(costs: Costs | None, kind: str, block: Hold) -> float:
    """Seconds of an offload or a reload of a block."""
    if costs is None:
        return 0.0
    tier = costs.machine.tiers.get(block.tier)
    if tier is None:
        known = ", ".join(costs.machine.tiers) or "none"
        raise OptionError(
            f"The program keeps carries in {block.tier!r}, but machine {costs.machine.name!r} has no such tier "
            f"(its tiers: {known}). Give it one, or plan without that tier."
        )
    return tier.write_seconds(block.units) if kind == "offload" else tier.read_seconds(block.units)
