"""A schedule with its numbers and its cost in runs of a step; the choices that a planner weighs, in order of cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from reroll.planning.options import Options
from reroll.schedules.interval import Interval, best_chunk, best_local_double, best_slots, thinned
from reroll.schedules.named import extra_runs, find, least_memory, tree
from reroll.schedules.problem import Problem
from reroll.words.units import nbytes_text

OPTIMAL = ("revolve", "hrevolve")
_BACKWARD = 2.0  # a backward in runs of a forward
_CALL = 0.5  # what a call of a segment costs beside its steps, in runs of a step
_UNHIDDEN = 1.1  # reading blocks when they are needed must save a tenth, as nothing hides the transfers
_BLOCKS = (1, 2, 4)  # segments of a block of "remote", where that is weighed beside others
_SIZES = 100  # of memory that are told apart where none is asked for
SLOWER = 1.05  # of the fastest plan's time: what a plan without a budget may take to hold less


@dataclass(frozen=True, slots=True)
class Thinning:
    """What thin tapes would change: the bytes of the ``tape`` of a segment, and ``scratch``, what its reversal works
    with beyond that of a whole one. In runs of a segment: what a reversal ``repeats``, and what a run for a tape
    ``alone`` takes."""

    tape: int
    scratch: int
    repeats: float
    alone: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule with its numbers: the problem that it is given, in steps and bytes. ``allowed``: local bytes that it
    had to meet, if there was a budget. ``ahead``: blocks are read while the chunk behind them is reversed, which holds
    one more, rather than when they are needed. ``thin``: the first so many steps have thin tapes, whose reversal
    ``repeats`` a part of each; a run for a tape ``alone`` takes a part of a run."""

    schedule: str
    problem: Problem
    allowed: int | None = None
    ahead: bool = True
    thin: int = 0
    repeats: float = 0.0
    alone: float = 1.0

    @property
    def steps(self) -> int:
        """Steps of the recurrence."""
        return self.problem.steps

    @property
    def segment(self) -> int:
        """Steps of a segment."""
        return self.problem.segment

    @property
    def root(self) -> Interval:
        """Where carries are kept."""
        root = tree(self.schedule, self.problem)
        return thinned(root, self.thin) if self.thin else root

    @property
    def extra_runs(self) -> float:
        """What a schedule that is chosen for a budget costs beside one run of each segment, in runs, with transfers. 0
        for others, which do not depend on the length of segments."""
        if self.schedule in OPTIMAL:
            return extra_runs(self.schedule, self.problem)
        if self.schedule != "remote":
            return 0.0
        blocks = -(-self.steps // (self.problem.chunk or 1))
        return self.problem.segments + blocks * (self.problem.write + self.problem.read)

    def describe(self) -> str:
        """The schedule and the numbers that it uses."""
        problem, numbers = self.problem, find(self.schedule).numbers
        texts = [f"segment {problem.segment}"]
        texts += [f"chunk {problem.chunk}"] if "chunk" in numbers else []
        texts += [f"slots {problem.slots}"] if "slots" in numbers and problem.slots is not None else []
        memory = problem.memory if "memory" in numbers and problem.slots is None else None
        texts += [f"memory {nbytes_text(memory)}"] if memory is not None else []
        texts += [problem.tier if self.ahead else f"{problem.tier}, not read ahead"] if "remote" in numbers else []
        texts += [f"thin tapes of {self.thin if self.thin < self.steps else 'all'}"] if self.thin else []
        return f"{self.schedule} ({', '.join(texts)})"


def steps_run(choice: Choice) -> float:
    """The time of a choice in runs of a step, so that segments of other lengths can be compared. The same for the same
    network on every machine, but for what transfers cost there."""
    again = choice.extra_runs
    shorter = min(again, choice.problem.segments) * (1 - choice.alone)  # each segment is taped once more at most
    runs = (1 + _BACKWARD) * choice.steps + (again - shorter) * choice.segment + choice.thin * choice.repeats
    return runs * (1 + _CALL / choice.segment)


def preferred(problem: Problem, options: Options, replay: bool) -> Choice:
    """What is chosen without a budget. ``replay``: tapes are so small that no step need run again."""
    if options.schedule == "auto" and options.chunk is None and options.truncate is not None:
        return Choice("standard", replace(problem, chunk=problem.whole(options.truncate)))
    if options.schedule == "auto" and options.chunk is None:
        return Choice("store_all", problem) if replay else _nearly_fastest(problem)
    schedule = "standard" if options.schedule == "auto" else options.schedule
    numbers = find(schedule).numbers
    steps, carry, tape = problem.steps, problem.carry, max(problem.tape // problem.segment, 1)
    chunk, slots = best_chunk(steps, carry, tape), options.slots
    if "chunk" in numbers and "slots" in numbers:
        if problem.tier == "local":
            chunk, slots = best_local_double(steps, carry, tape)
        chunk = problem.whole(options.chunk or chunk)
        if options.chunk is not None or problem.tier != "local":
            slots = best_slots(chunk, carry, tape)
        slots = min(options.slots or slots or 1, chunk)
    return Choice(schedule, replace(problem, chunk=problem.whole(options.chunk or chunk), slots=slots))


def _nearly_fastest(problem: Problem) -> Choice:
    """Of the choices that take at most 5 % longer than the fastest, which tapes every step, that of least memory."""
    fastest, whole = Choice("store_all", problem), problem.segments * problem.tape
    longest = SLOWER * steps_run(fastest)
    sizes = range(least_memory(problem), whole, max(whole // _SIZES, 1))
    found = bisect_left(sizes, True, key=lambda memory: steps_run(_within(problem, memory)) <= longest)
    return _within(problem, sizes[found]) if found < len(sizes) else fastest


def _within(problem: Problem, memory: int) -> Choice:
    """What runs least within so many bytes of carries and tapes."""
    return Choice("revolve", replace(problem, memory=memory, slots=None))


def may_move(options: Options) -> bool:
    """Whether a budget may be met by moving carries to a tier that was named."""
    moving = bool(options.tiers) and "local" not in options.tiers
    return options.schedule == "auto" and options.chunk is None and moving


def candidates(
    first: Choice,
    options: Options,
    memory: int,
    waiting: int,
    carry: int,
    thinning: Callable[[], Thinning | None] = lambda: None,
) -> Iterator[Choice]:
    """Choices in the order of their cost, ``first`` that without a budget.

    ``memory``: bytes for carries and tapes, and for carries on their way: ``waiting`` of them, of which one ``carry``
    is not held where blocks are not read ahead. ``thinning``: says what thin tapes would change, if there can be some.
    """
    schedule, problem = first.schedule, replace(first.problem, memory=memory)
    optimal = _optimal(first, options)
    if options.schedule == "auto" and optimal:
        problem = replace(problem, slots=None)
        yield Choice("store_all", problem)
    if optimal:
        thin = thinning()
        found = _cheapest(optimal, problem, waiting, max(waiting - carry, 0))
        if thin:
            found = [replace(each, alone=thin.alone) for each in found] + _thinner(problem, thin)
        yield from sorted(found, key=cost)
    else:
        numbered = list(_numbered(Choice(schedule, problem), options))
        yield from numbered
        yield from (late for each in numbered for late in list(_both(each))[1:])


def lowest(first: Choice, options: Options) -> Iterator[Choice]:
    """The optimal schedules that may be chosen, each for the least memory that it needs, whatever is left."""
    optimal, problem = _optimal(first, options), replace(first.problem, slots=None)
    if "revolve" in optimal:
        yield Choice("revolve", replace(problem, memory=least_memory(problem)))
    if "hrevolve" in optimal:
        yield from _both(Choice("hrevolve", replace(problem, memory=problem.carry + problem.tape)))


def _optimal(first: Choice, options: Options) -> tuple[str, ...]:
    """The schedules that are cheapest for the memory that they are given, of those that may be chosen."""
    if options.schedule == "auto" and options.chunk is None:
        return (*OPTIMAL, "remote") if may_move(options) else ("revolve",)
    return (first.schedule,) if first.schedule in OPTIMAL and first.problem.slots is None else ()


def _both(choice: Choice) -> Iterator[Choice]:
    """A choice, and if it moves carries, the same without reading ahead."""
    yield choice
    if "remote" in find(choice.schedule).numbers and choice.problem.tier != "local":
        yield replace(choice, ahead=False)


def _numbered(choice: Choice, options: Options) -> Iterator[Choice]:
    """Choices of one schedule with several chunks and slots, unless these were asked for."""
    problem, numbers = choice.problem, find(choice.schedule).numbers
    if "chunk" not in numbers:
        yield choice
        return
    chunk = problem.chunk or 1
    chunks = [chunk] if options.chunk else _spread(chunk, problem.steps, problem.segment)
    for chunk in chunks:
        nested = "slots" in numbers and not options.slots
        slots = _spread(problem.slots or 1, chunk, 1) if nested else [problem.slots or 1]
        for number in slots:
            yield replace(choice, problem=replace(problem, chunk=chunk, slots=min(number, chunk)))


def _thinner(problem: Problem, thin: Thinning) -> list[Choice]:
    """All tapes kept, one or more of them thin; and thin ones with carries in the memory of a problem."""
    memory, whole = problem.memory or 0, replace(problem, memory=None)
    if thin.tape >= problem.tape:
        return []
    counts = range(1, problem.segments + 1)  # all: those that need too much are told by their bound
    some = [Choice("store_all", whole, thin=min(count * problem.segment, problem.steps)) for count in counts]
    smaller = replace(problem, tape=thin.tape, memory=max(memory - thin.scratch, 1))
    fits = memory - thin.scratch >= least_memory(smaller)
    every = [Choice("revolve", smaller, thin=problem.steps)] if fits else []
    return [replace(each, repeats=thin.repeats, alone=thin.alone) for each in (*some, *every)]


def _cheapest(schedules: Sequence[str], problem: Problem, waiting: int, unread: int) -> list[Choice]:
    """Optimal schedules for the memory of a problem.

    In "remote" no carry is held while a segment is reversed from it, which the optimal ones do not know of.
    """
    memory, found = problem.memory or 0, list[Choice]()
    if "revolve" in schedules and memory >= least_memory(problem):
        found += [Choice("revolve", problem)]
    if "hrevolve" in schedules:
        least = problem.carry + problem.tape
        for choice in _both(Choice("hrevolve", problem)):
            given = max(memory - (waiting if choice.ahead else unread), least)
            found += [replace(choice, problem=replace(problem, memory=given))]
    if "remote" in schedules:
        chunks = dict.fromkeys(min(count * problem.segment, problem.steps) for count in _BLOCKS)
        found += (each for chunk in chunks for each in _both(Choice("remote", replace(problem, chunk=chunk))))
    return found


def cost(choice: Choice) -> float:
    """Runs of a step, with what transfers cost that are not hidden."""
    return steps_run(choice) * (1 if choice.ahead else _UNHIDDEN)


def _spread(middle: int, most: int, least: int) -> list[int]:
    """Numbers in [least, most], near ``middle`` first."""
    factors = (1.0, 0.7, 1.4, 0.5, 2.0, 0.35, 2.8, 0.25, 4.0, 0.12, 8.0, 0.0)
    return list(dict.fromkeys(min(max(round(middle * factor), least), most) for factor in factors))
