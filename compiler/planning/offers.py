"""What each schedule offers for a problem whose costs are known: its best chunk and slots, and what they cost.

Nothing is built. The trees of revolve and hrevolve are counted (``reroll.schedules.counts``). For the others the
formulas (``reroll.schedules.formulas``) are evaluated for all chunks and slots that can differ. Where there are many,
these are the shortest chunks that give each number of chunks, with all sub-chunks that differ, the chunks that are a
whole number of equal sub-chunks, and all near the smooth optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reroll.errors import OptionError
from reroll.schedules.counts import Counts, counted
from reroll.schedules.formulas import formula
from reroll.schedules.machine import Costs
from reroll.schedules.named import least_memory, tree
from reroll.schedules.problem import Problem

Integers = NDArray[np.int64]

_FEW, _MANY = 300, 1 << 17  # segments up to which all chunks with all slots, or all chunks, are tried


@dataclass(frozen=True, slots=True)
class Priced(Problem):
    """A problem with the ``costs`` of its segments, and of the tier where carries may go.

    ``memory`` is the budget in local bytes; ``chunk`` and ``slots`` fix these numbers; ``tier`` is "local" where there
    is no other. Raises OptionError for numbers that make no sense, MachineError for what the costs do not know.
    """

    costs: Costs = field(kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        Problem.__post_init__(self)
        if self.memory is not None and self.memory < 1:
            raise OptionError(f"A plan was asked for memory={self.memory!r}, but it must be a whole number, 1 or more.")
        for inner, outer in (("segment", "steps"), ("chunk", "steps"), ("slots", "chunk"), ("slots", "steps")):
            less, more = getattr(self, inner), getattr(self, outer)
            if less is not None and more is not None and less > more:
                raise OptionError(f"A plan was asked for {inner}={less} of {outer}={more}: give {more} at most.")
        self.costs.numbers(self.segment, self.remote)

    @property
    def remote(self) -> str | None:
        """The tier where carries may go, if there is one."""
        return None if self.tier == "local" else self.tier

    @property
    def numbers(self) -> dict[str, float]:
        """What formulas ask, but for chunk and slots."""
        found: dict[str, float] = {"steps": self.steps, "carry": self.carry, "tape": self.tape / self.segment}
        return found | self.costs.numbers(self.segment, self.remote)

    def holds(self, remote_peak: ArrayLike) -> NDArray[np.bool_]:
        """Whether the remote tier holds so many bytes."""
        capacity = None if self.remote is None else self.costs.machine.tier(self.remote).capacity
        return np.asarray(remote_peak) <= (math.inf if capacity is None else capacity)

    def ticks(self, seconds: ArrayLike) -> NDArray[np.float64]:
        """Seconds in thousandths of plain BPTT's, rounded: what differs by less is as fast."""
        each = self.costs.of(self.segment)
        plain = self.segments * (each.tape + each.backward)
        return np.rint(np.asarray(seconds) / (plain / 1000 or 1.0))

    def rank(self, row: Row) -> tuple[float, int, int]:
        """The order of rows that fit: the fastest first, of equally fast ones that with fewer transfers, then bytes."""
        return float(self.ticks(row.seconds)), row.writes + row.reads, row.local_peak


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule with its numbers, in steps, bytes, seconds and transfers.

    ``tier``: where the carries of chunks are kept; ``carries``: how many are written to a remote tier, and read.
    ``chunk`` and ``slots`` are None where the schedule has none; ``memory`` is what it was asked to keep to, if it was.
    """

    schedule: str
    tier: str
    chunk: int | None
    slots: int | None
    local_peak: int
    remote_peak: int
    seconds: float
    rerun: int
    writes: int
    reads: int
    carries: int
    fits: bool
    memory: int | None = None

    def options(self, segment: int) -> dict[str, int | str]:
        """The options of ``reroll.compile`` that ask for this. A budget there is for all that a training step holds."""
        numbers = {"segment": segment, "chunk": self.chunk, "slots": self.slots, "memory_budget": self.memory}
        given: dict[str, int | str] = {"schedule": self.schedule}
        given |= {name: number for name, number in numbers.items() if number is not None}
        if self.tier != "local" or self.schedule == "double":
            given["remote"] = self.tier
        return given


Offer = Callable[[Priced], Iterator[Row]]


def by_formula(
    problem: Priced, schedule: str, *, remote: bool, chunks: bool = True, slots: bool = False
) -> Iterator[Row]:
    """The fastest row that fits, if there is one, and the one of least local peak; nothing without a tier to go to.

    ``chunks``, ``slots``: whether the schedule has them.
    """
    if remote and problem.remote is None:
        return
    tier = problem.remote if remote and problem.remote else "local"
    every, counts = _candidates(problem, slots) if chunks else (np.array([problem.steps]), np.array([1]))
    found = formula(schedule, tier).evaluate(chunk=every, slots=counts, **problem.numbers)
    peaks = found.prefetched_peak if problem.costs.overlapped else found.local_peak
    seconds = found.overlapped if problem.costs.overlapped else found.blocking
    held = problem.holds(found.remote_peak)
    fits = held & (peaks <= (problem.memory or math.inf))
    fastest = np.lexsort((peaks, found.writes, problem.ticks(seconds), ~fits))[0]
    smallest = np.lexsort((seconds, peaks, ~held))[0]
    for index in dict.fromkeys((int(fastest), int(smallest))):
        yield Row(
            schedule=schedule,
            tier=tier,
            chunk=min(int(every[index]), problem.steps) if chunks else None,
            slots=int(counts[index]) if slots else None,
            local_peak=int(peaks[index]),
            remote_peak=int(found.remote_peak[index]),
            seconds=float(seconds[index]),
            rerun=int(found.rerun[index]),
            writes=int(found.writes[index]),
            reads=int(found.reads[index]),
            carries=int(found.carries[index]),
            fits=bool(fits[index]),
        )


def by_search(problem: Priced, schedule: str, *, remote: bool) -> Iterator[Row]:
    """The optimum within the budget; if it does not fit, that in the least memory with which it can be had.

    Without a budget in the memory that standard takes at its best; in as many slots as were asked for.
    """
    if remote and problem.remote is None:
        return
    forward = problem.costs.of(problem.segment).forward
    asked = problem.moving(problem.costs.machine.tier(problem.tier), forward) if remote else problem
    ahead = problem.carry if remote and problem.costs.overlapped else 0
    for memory in _memories(problem, ahead + (problem.carry + problem.tape if remote else least_memory(problem))):
        try:
            root = tree(schedule, replace(asked, memory=None if memory is None else memory - ahead))
        except OptionError:  # so few slots that segments would run very often
            return
        row = _row(problem, schedule, counted(root, asked), remote=remote, memory=memory)
        yield row
        if row.fits:
            return


def _memories(problem: Priced, least: int) -> Iterator[int | None]:
    """Sizes of memory to try in turn."""
    if problem.slots is not None or problem.memory is None:
        yield None
        return
    if problem.memory >= least:
        yield problem.memory
    yield least


def _row(problem: Priced, schedule: str, found: Counts, *, remote: bool, memory: int | None) -> Row:
    """The row of a tree that was counted."""
    peak = found.local_peak + (problem.carry if problem.costs.overlapped and found.reads else 0)
    return Row(
        schedule=schedule,
        tier=problem.tier if remote else "local",
        chunk=None,
        slots=problem.slots,
        local_peak=peak,
        remote_peak=found.remote_peak,
        seconds=_seconds(problem, found),
        rerun=found.rerun,
        writes=found.writes,
        reads=found.reads,
        carries=found.writes,
        fits=bool(problem.holds(found.remote_peak)) and peak <= (problem.memory or math.inf),
        memory=memory,
    )


def _seconds(problem: Priced, found: Counts) -> float:
    """Of all segments and transfers; where these overlap, of the slowest stream: it may be more."""
    each = problem.costs.of(problem.segment)
    work = problem.segments * (each.tape + each.backward) + found.runs * each.forward
    if not found.writes:
        return work
    tier = problem.costs.machine.tier(problem.tier)
    write, read = tier.write_seconds(problem.carry), tier.read_seconds(problem.carry)
    if problem.costs.overlapped:
        return max(work, found.writes * write, found.reads * read)
    return work + found.writes * write + found.reads * read


OFFERS: Mapping[str, Offer] = {
    "store_all": partial(by_formula, schedule="store_all", remote=False, chunks=False),
    "standard": partial(by_formula, schedule="standard", remote=False),
    "double, local": partial(by_formula, schedule="double", remote=False, slots=True),
    "revolve": partial(by_search, schedule="revolve", remote=False),
    "remote": partial(by_formula, schedule="remote", remote=True),
    "hierarchical": partial(by_formula, schedule="hierarchical", remote=True, slots=True),
    "double": partial(by_formula, schedule="double", remote=True, slots=True),
    "hrevolve": partial(by_search, schedule="hrevolve", remote=True),
}
"""By the name of a scheme the rows among which a plan may choose; a new schedule adds its function here."""


def plan_rows(problem: Priced) -> list[Row]:
    """One row for each scheme that can be had: the fastest that fits the budget; if none does, or without a budget, the
    one of least local peak."""
    rows: list[Row] = []
    for offer in OFFERS.values():
        offered = list(offer(problem))
        fitting = [row for row in offered if row.fits and problem.memory is not None]
        if fitting:
            rows.append(min(fitting, key=problem.rank))
        elif offered:
            rows.append(least(problem, offered))
    return rows


def least(problem: Priced, rows: Sequence[Row]) -> Row:
    """The row of least local peak, among those for which the remote tier is large enough."""
    return min(rows, key=lambda row: (not problem.holds(row.remote_peak), row.local_peak, row.seconds))


def recommended(problem: Priced, rows: Sequence[Row]) -> Row | None:
    """The fastest row that fits; None if none does."""
    return min((row for row in rows if row.fits), key=problem.rank, default=None)


def _candidates(problem: Priced, nested: bool) -> tuple[Integers, Integers]:
    """Chunks in steps and slots, to be tried together."""
    segments = problem.segments
    if problem.chunk is not None:
        chunks = np.array([-(-problem.chunk // problem.segment)])
    elif segments <= (_FEW if nested else _MANY):
        chunks = np.arange(1, segments + 1)
    else:
        chunks = _quotients(segments)
    if not nested:
        return chunks * problem.segment, np.ones_like(chunks)
    if problem.slots is not None:
        chunks = chunks[chunks * problem.segment >= problem.slots]
        return chunks * problem.segment, np.full_like(chunks, problem.slots)
    parts = [(chunk, -(-chunk // _quotients(chunk))) for chunk in chunks.tolist()]
    if problem.chunk is None and len(chunks) < segments:
        lengths = _quotients(segments).tolist()
        counts = [_quotients(-(-segments // length)) for length in lengths]
        parts += [(np.minimum(each * length, segments), each) for length, each in zip(lengths, counts, strict=True)]
        parts += _near_least(segments, problem.carry / problem.tape)
    pairs = [np.broadcast_arrays(chunk, slots) for chunk, slots in parts]
    every, several = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return every * problem.segment, several


def _near_least(segments: int, ratio: float) -> Iterator[tuple[Integers, Integers]]:
    """Chunks near (T^2 s / a)^(1/3), which is best with both levels local, with slots near the best of each.

    A last chunk that is short moves the best chunk. ``ratio`` is of a carry to the tape of a segment.
    """
    best = (segments**2 * ratio) ** (1 / 3)
    chunks = np.arange(max(int(best / 3), 1), min(int(best * 3), segments) + 1)
    slots = np.rint(np.sqrt(chunks / ratio)).astype(np.int64)
    for offset in range(-2, 3):
        yield chunks, np.clip(slots + offset, 1, chunks)


def _quotients(number: int) -> Integers:
    """All that a number gives, divided by whole numbers and rounded up, and the whole numbers up to its root."""
    small = np.arange(1, min(math.isqrt(number) + 1, number) + 1)
    return np.unique(np.concatenate([small, -(-number // small)]))
