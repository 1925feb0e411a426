"""What each schedule offers for a problem given in numbers: its best chunk and slots, and what they cost.

Nothing is built: the formulas (``reroll.formulas``) are evaluated for all chunks and slots that can differ. Where there
are many, these are the shortest chunks that give each number of chunks, with all sub-chunks that differ, the chunks
that are a whole number of equal sub-chunks, and all near the smooth optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reroll.costs import Costs
from reroll.errors import OptionError
from reroll.formulas import formula

Counts = NDArray[np.int64]

_FEW, _MANY = 300, 1 << 17  # segments up to which all chunks with all slots, or all chunks, are tried


@dataclass(frozen=True, slots=True)
class Problem:
    """A recurrence in numbers.

    ``carry`` and ``tape`` in bytes of one carry and one taped step; ``costs`` know the seconds of a segment of
    ``segment`` steps, and the tier ``remote``, where carries may go. ``budget`` in local bytes. ``chunk`` and ``slots``
    fix these numbers. Raises OptionError for numbers that make no sense, MachineError for what the costs do not know.
    """

    steps: int
    carry: int
    tape: int
    costs: Costs
    segment: int = 1
    budget: int | None = None
    remote: str | None = None
    chunk: int | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "carry", "tape", "segment", "budget", "chunk", "slots"):
            number = getattr(self, name)
            optional = number is None and name in ("budget", "chunk", "slots")
            if not optional and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise OptionError(f"A plan was asked for {name}={number!r}, but it must be a whole number, 1 or more.")
        for inner, outer in (("segment", "steps"), ("chunk", "steps"), ("slots", "chunk"), ("slots", "steps")):
            less, more = getattr(self, inner), getattr(self, outer)
            if less is not None and more is not None and less > more:
                raise OptionError(f"A plan was asked for {inner}={less} of {outer}={more}: give {more} at most.")
        self.costs.numbers(self.segment, self.remote)

    @property
    def segments(self) -> int:
        """Of which only the last may be short."""
        return -(-self.steps // self.segment)

    @property
    def numbers(self) -> dict[str, float]:
        """What formulas ask, but for chunk and slots."""
        found: dict[str, float] = {"steps": self.steps, "carry": self.carry, "tape": self.tape}
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
    ``chunk`` and ``slots`` are None where the schedule has none.
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

    def options(self, segment: int) -> dict[str, int | str]:
        """The options of ``reroll.compile`` that ask for this."""
        numbers = {"segment": segment, "chunk": self.chunk, "slots": self.slots}
        given: dict[str, int | str] = {"schedule": self.schedule}
        given |= {name: number for name, number in numbers.items() if number is not None}
        if self.tier != "local" or self.schedule == "double":
            given["remote"] = self.tier
        return given


Offer = Callable[[Problem], Iterator[Row]]


def by_formula(
    problem: Problem, schedule: str, *, remote: bool, chunks: bool = True, slots: bool = False
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
    fits = held & (peaks <= (problem.budget or math.inf))
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


OFFERS: Mapping[str, Offer] = {
    "store_all": partial(by_formula, schedule="store_all", remote=False, chunks=False),
    "standard": partial(by_formula, schedule="standard", remote=False),
    "double, local": partial(by_formula, schedule="double", remote=False, slots=True),
    "remote": partial(by_formula, schedule="remote", remote=True),
    "hierarchical": partial(by_formula, schedule="hierarchical", remote=True, slots=True),
    "double": partial(by_formula, schedule="double", remote=True, slots=True),
}
"""By the name of a scheme the rows among which a plan may choose; a new schedule adds its function here."""


def plan_rows(problem: Problem) -> list[Row]:
    """One row for each scheme that can be had: the fastest that fits the budget; if none does, or without a budget, the
    one of least local peak."""
    rows: list[Row] = []
    for offer in OFFERS.values():
        offered = list(offer(problem))
        fitting = [row for row in offered if row.fits and problem.budget is not None]
        if fitting:
            rows.append(min(fitting, key=problem.rank))
        elif offered:
            rows.append(least(problem, offered))
    return rows


def least(problem: Problem, rows: Sequence[Row]) -> Row:
    """The row of least local peak, among those for which the remote tier is large enough."""
    return min(rows, key=lambda row: (not problem.holds(row.remote_peak), row.local_peak, row.seconds))


def recommended(problem: Problem, rows: Sequence[Row]) -> Row | None:
    """The fastest row that fits; None if none does."""
    return min((row for row in rows if row.fits), key=problem.rank, default=None)


def _candidates(problem: Problem, nested: bool) -> tuple[Counts, Counts]:
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
        parts += _near_least(segments, problem.carry / (problem.tape * problem.segment))
    pairs = [np.broadcast_arrays(chunk, slots) for chunk, slots in parts]
    every, several = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return every * problem.segment, several


def _near_least(segments: int, ratio: float) -> Iterator[tuple[Counts, Counts]]:
    """Chunks near (T^2 s / a)^(1/3), which is best with both levels local, with slots near the best of each.

    A last chunk that is short moves the best chunk. ``ratio`` is of a carry to the tape of a segment.
    """
    best = (segments**2 * ratio) ** (1 / 3)
    chunks = np.arange(max(int(best / 3), 1), min(int(best * 3), segments) + 1)
    slots = np.rint(np.sqrt(chunks / ratio)).astype(np.int64)
    for offset in range(-2, 3):
        yield chunks, np.clip(slots + offset, 1, chunks)


def _quotients(number: int) -> Counts:
    """All that a number gives, divided by whole numbers and rounded up, and the whole numbers up to its root."""
    small = np.arange(1, min(math.isqrt(number) + 1, number) + 1)
    return np.unique(np.concatenate([small, -(-number // small)]))
