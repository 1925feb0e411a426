"""Schedules by name: those of reroll, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from reroll.errors import OptionError, ScheduleError
from reroll.schedules import interval as schedule
from reroll.schedules.interval import Interval
from reroll.schedules.optimal.best import farthest, optimum
from reroll.schedules.optimal.problem import LocalSlots, OneTier, Piece, Schedule, SlowTier
from reroll.schedules.problem import Problem
from reroll.words.registry import Registry

NUMBERS = ("chunk", "slots", "memory", "remote")
Builder = Callable[[Problem], Interval]


@dataclass(frozen=True, slots=True)
class Named:
    """A schedule: ``build`` gives its tree; ``numbers`` names what it reads of "chunk", "slots", "memory" and
    "remote"."""

    name: str
    build: Builder
    numbers: tuple[str, ...]


SCHEDULES: Registry[Named] = Registry("schedule", ScheduleError, unknown=OptionError)


def register_schedule(name: str, numbers: tuple[str, ...] = ()) -> Callable[[Builder], Builder]:
    """Register a function from a ``Problem`` to the tree of intervals that says where carries are kept.

    It is asked for by ``schedule=name``. ``numbers``: which it reads of the options "chunk", "slots" and "remote" (the
    others are refused together with it), and "memory" if it makes the best of a budget. Raises
    ScheduleError for a name that is taken, except in ``__main__``, where a notebook may run a cell again.
    """
    if not name.isidentifier() or name == "auto":
        raise ScheduleError(f"A schedule cannot be named {name!r}. Choose a name of letters, digits and underscores.")
    if unknown := set(numbers) - set(NUMBERS):
        raise ScheduleError(f"Schedule {name!r} reads {sorted(unknown)}; it may read {', '.join(NUMBERS)}.")

    def register(build: Builder) -> Builder:
        SCHEDULES.add(Named(name, build, numbers), build)
        return build

    return register


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules, in the order in which they were registered."""
    return SCHEDULES.names()


def find(name: str) -> Named:
    """The schedule of that name. Raises OptionError, naming the nearest one."""
    return SCHEDULES.find(name)


def tree(name: str, problem: Problem) -> Interval:
    """The tree of a schedule. Raises ScheduleError if the schedule fails, or gives no tree of whole segments."""
    named = find(name)
    try:
        root: object = named.build(problem)
    except OptionError:
        raise
    except Exception as error:
        raise ScheduleError(f"Schedule {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(root, Interval):
        found = type(root).__name__
        raise ScheduleError(f"Schedule {name!r} must return a reroll.Interval, but it returned a {found}.")
    if root.steps != problem.steps:
        raise ScheduleError(f"Schedule {name!r} has {root.steps} steps, and the recurrence {problem.steps}. Cover all.")
    return root


def _chunk(problem: Problem) -> int:
    return 1 if problem.chunk is None else problem.chunk


def _slots(problem: Problem) -> int:
    return 1 if problem.slots is None else problem.slots


@register_schedule("store_all")
def _store_all(problem: Problem) -> Interval:
    return schedule.store_all(problem.steps, segment=problem.segment)


@register_schedule("standard", ("chunk",))
def _standard(problem: Problem) -> Interval:
    return schedule.standard(problem.steps, _chunk(problem), segment=problem.segment)


@register_schedule("every_k", ("chunk",))
def _every_k(problem: Problem) -> Interval:
    """A local carry every ``chunk`` steps, as usual checkpointing does: standard with the last chunk taped at once."""
    root = schedule.standard(problem.steps, _chunk(problem), segment=problem.segment)
    return replace(root, children=(*root.children[:-1], replace(root.children[-1], taped=True)))


@register_schedule("full")
def _full(problem: Problem) -> Interval:
    """Only the first carry is kept, and all steps run again before their backward, as in one call of torch's
    checkpoint."""
    return schedule.standard(problem.steps, problem.steps, segment=problem.segment)


@register_schedule("remote", ("chunk", "remote"))
def _remote(problem: Problem) -> Interval:
    return schedule.remote(problem.steps, _chunk(problem), problem.tier, segment=problem.segment)


@register_schedule("hierarchical", ("chunk", "slots", "remote"))
def _hierarchical(problem: Problem) -> Interval:
    return schedule.hierarchical(problem.steps, _chunk(problem), _slots(problem), problem.tier, segment=problem.segment)


@register_schedule("double", ("chunk", "slots", "remote"))
def _double(problem: Problem) -> Interval:
    return schedule.double(problem.steps, _chunk(problem), _slots(problem), problem.tier, segment=problem.segment)


@register_schedule("double_merged", ("chunk", "slots", "remote"))
def _double_merged(problem: Problem) -> Interval:
    return schedule.double_merged(
        problem.steps, _chunk(problem), _slots(problem), problem.tier, segment=problem.segment
    )


MOST_RUNS = 16
"""A schedule that would run a segment forward more often is refused: a few bytes more are worth it."""


@register_schedule("revolve", ("slots", "memory"))
def _revolve(problem: Problem) -> Interval:
    """The optimum for K slots, one of which holds the first carry, beside the tape of a segment; without slots for
    memory in bytes, which carries and tapes share (without a budget: as much as the best chunk of standard takes)."""
    fast = _fast(problem)
    if fast is None:
        return Interval(problem.steps)
    if farthest(fast, MOST_RUNS - 1, problem.segments) < problem.segments:
        given = f"{problem.slots} slots" if problem.slots is not None else f"{problem.memory:,} bytes"
        raise OptionError(
            f"Schedule 'revolve' would run some of {problem.segments:,} segments more than {MOST_RUNS} times with "
            f"{given} for carries and tapes. Give it more, or use one that moves carries off, such as 'hrevolve'."
        )
    return _interval(optimum(problem.segments, fast), problem)


@register_schedule("hrevolve", ("slots", "memory", "remote"))
def _hrevolve(problem: Problem) -> Interval:
    """The optimum over two tiers: as revolve, with carries in ``tier`` too, whose writes and reads cost ``write`` and
    ``read`` runs of a segment."""
    found = optimal("hrevolve", problem)
    return Interval(problem.steps) if found is None else _interval(found, problem)


def optimal(name: str, problem: Problem) -> Schedule | None:
    """What revolve or hrevolve finds, with its cost in runs of a segment; None if all segments are taped."""
    fast = _fast(problem)
    if fast is None:
        return None
    slow = [SlowTier(problem.room, problem.write, problem.read)] if name == "hrevolve" else []
    return optimum(problem.segments, fast, *slow)


def extra_runs(name: str, problem: Problem) -> float:
    """What revolve or hrevolve costs beside one run of each segment, transfers included, in runs of a segment."""
    found = optimal(name, problem)
    return 0.0 if found is None else found.extra


def _fast(problem: Problem) -> OneTier | LocalSlots | None:
    """The memory that carries and tapes share, or slots; None if all segments can be taped."""
    if problem.slots is not None:
        return LocalSlots(problem.slots) if problem.segments > 1 else None
    memory = _standard_memory(problem) if problem.memory is None else problem.memory
    if problem.segments * problem.tape <= memory:
        return None
    return OneTier(problem.carry, problem.tape, memory - problem.carry)


def _interval(found: Schedule, problem: Problem) -> Interval:
    """A schedule of segments as a tree of steps, in which equal pieces are one object."""
    tiers, known = ("local", problem.tier), dict[tuple[Piece, int], Interval]()

    def inner(piece: Piece, missing: int) -> Interval:
        if (piece, missing) not in known:
            steps = piece.length * problem.segment - missing
            if piece.tier is None:
                return Interval(steps, taped=True)
            *parts, last = found.pieces(piece) or (None,)
            children = [inner(part, 0) for part in parts if part]
            children += [inner(last, missing)] if last else []
            known[piece, missing] = Interval(steps, tiers[piece.tier], tuple(children))
        return known[piece, missing]

    return replace(inner(found.root, problem.segments * problem.segment - problem.steps), tier="local")


def _standard_memory(problem: Problem) -> int:
    """The local peak of standard with its best chunk, 2 sqrt(T s a), in whole segments."""
    chunk = schedule.best_chunk(problem.segments, problem.carry, problem.tape)
    return -(-problem.segments // chunk) * problem.carry + chunk * problem.tape


def least_memory(problem: Problem) -> int:
    """The least memory for carries and tapes with which revolve runs no segment more than ``MOST_RUNS`` times."""
    low, high = problem.carry + problem.tape - 1, problem.segments * (problem.carry + problem.tape)
    while high - low > 1:
        middle = (low + high) // 2
        tier = OneTier(problem.carry, problem.tape, middle - problem.carry)
        reached = farthest(tier, MOST_RUNS - 1, problem.segments)
        low, high = (low, middle) if reached == problem.segments else (middle, high)
    return min(high, problem.segments * problem.tape)
