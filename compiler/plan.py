"""From options and sizes to a plan: segment, chunk, slots, tier, and the tree of intervals that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from reroll.errors import BudgetError
from reroll.footprint import result_nbytes
from reroll.options import Options, parse_budget
from reroll.recurrence import Recurrence
from reroll.schedule import Interval, best_chunk, best_local_double, best_slots
from reroll.schedules import Problem, extra_runs, find, least_memory, tree
from reroll.tables import nbytes_text

_SEGMENT = {"inductor": 8, "eager": 4}
_SMALL = ((4096, 32), (8192, 16))  # bytes that a step makes, and steps for which calling a segment no longer counts
_MANY, _OPERATIONS = 512, 256  # steps from which on they are worth compiling, operations in one of them at most


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule with its numbers: the problem that it is given, in steps and bytes. ``allowed``: local bytes that it
    had to meet, if there was a budget. ``ahead``: blocks are read while the chunk behind them is reversed, which holds
    one more, rather than when they are needed."""

    schedule: str
    problem: Problem
    allowed: int | None = None
    ahead: bool = True

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
        return tree(self.schedule, self.problem)

    @property
    def extra_runs(self) -> float:
        """What an optimal schedule costs beside one run of each segment, in runs; 0 for others, which do not depend on
        the length of segments."""
        return extra_runs(self.schedule, self.problem) if self.schedule in _OPTIMAL else 0.0

    def describe(self) -> str:
        """The schedule and the numbers that it uses."""
        problem, numbers = self.problem, find(self.schedule).numbers
        texts = [f"segment {problem.segment}"]
        texts += [f"chunk {problem.chunk}"] if "chunk" in numbers else []
        texts += [f"slots {problem.slots}"] if "slots" in numbers and problem.slots is not None else []
        memory = problem.memory if "memory" in numbers and problem.slots is None else None
        texts += [f"memory {nbytes_text(memory)}"] if memory is not None else []
        texts += [problem.tier if self.ahead else f"{problem.tier}, not read ahead"] if "remote" in numbers else []
        return f"{self.schedule} ({', '.join(texts)})"


_BACKWARD = 2.0  # a backward in runs of a forward
_CALL = 0.5  # what a call of a segment costs beside its steps, in runs of a step


def steps_run(choice: Choice) -> float:
    """The time of a choice in runs of a step, so that segments of other lengths can be compared. The same for the same
    network on every machine, but for what transfers cost there."""
    runs = (1 + _BACKWARD) * choice.steps + choice.extra_runs * choice.segment
    return runs * (1 + _CALL / choice.segment)


def usual_segment(recurrence: Recurrence, options: Options) -> int:
    """Steps compiled together if nobody says otherwise: more where there are many that take less time than a call.

    Not so for schedules that are chosen where every byte counts.
    """
    usual = _SEGMENT[options.lowering]
    if options.lowering == "eager" or options.moves_carries or recurrence.steps < _MANY:
        return usual
    calls = [node for node in recurrence.step.graph.nodes if node.op.startswith("call")]
    values = [node.meta.get("example_value") for node in calls]
    if any(value is None for value in values):
        return usual
    weights = [_operations(node) for node in calls]
    made = sum(weight * result_nbytes(value) for weight, value in zip(weights, values, strict=True))
    fitting = (length for most, length in _SMALL if made <= most and length * sum(weights) <= _OPERATIONS)
    return next(fitting, usual)


def _operations(call: fx.Node) -> int:
    """Operations that a call stands for: a cell of torch's is about a dozen."""
    return 12 if getattr(call.target, "__name__", "").endswith("_cell") else 1


def segment_length(recurrence: Recurrence, options: Options) -> int:
    """Steps compiled together: as asked for, else a length near the usual one that leaves the shortest last segment.

    Where the segments serve any number of steps it depends at most on whether these are many.
    """
    steps, usual = recurrence.steps, usual_segment(recurrence, options)
    if recurrence.any_length:
        return options.segment or usual
    if options.segment is not None:
        return min(options.segment, steps)
    if steps <= usual:
        return steps
    lengths = range(usual // 2 + 1, min(usual + usual // 2, steps) + 1)
    return min(lengths, key=lambda k: (steps % k, abs(k - usual)))


def any_lengths(length: int, options: Options) -> tuple[int, ...]:
    """The lengths of segments that make up any number of steps, few of them short, if most are of this length."""
    usual = _SEGMENT[options.lowering]
    return (length, *([usual] if length >= 2 * usual else []), *([1] if length > 1 else []))


def segment_lengths(recurrence: Recurrence, options: Options) -> list[int]:
    """Lengths to try in turn: under a budget also shorter ones, which need less at a time, down to one step."""
    lengths = [segment_length(recurrence, options)]
    while options.memory_budget is not None and options.segment is None and lengths[-1] > 1:
        lengths.append(lengths[-1] // 2)
    return lengths


def default_tier(options: Options, device: str) -> str:
    """The remote tier: the one asked for, else host RAM for a GPU and disk for a CPU."""
    if options.tiers:
        return options.tiers[0]
    return "disk" if device == "cpu" else "host"


@dataclass(frozen=True, slots=True)
class Beside:
    """What shares a budget with a recurrence: bytes ``around`` the recurrences of its graph, of which there are
    ``count``, as what all of them keep is held at the same time. ``budget``: bytes in place of the option's."""

    around: int = 0
    count: int = 1
    budget: int | None = None

    def allowed(self, budget: int) -> int:
        """Local bytes of one recurrence."""
        return (budget - self.around) // self.count

    def needed(self, peak: int) -> int:
        """The least budget for recurrences of which each has this peak."""
        return self.around + self.count * peak


ALONE = Beside()


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of a recurrence when its schedule is chosen, in bytes.

    ``carry`` as it is kept, ``tape`` of a whole segment, ``scratch``: the most that a running instruction needs besides
    carries and tapes, ``waiting`` of carries that wait to be written, or were read ahead. ``peak``: the predicted local
    peak of a choice. ``replay``: tapes are so small that no step need run again. ``moving``: gives a problem what it
    costs to move carries.
    """

    carry: int
    tape: int
    scratch: int
    peak: Callable[[Choice], int]
    replay: bool = False
    waiting: int = 0
    moving: Callable[[Problem], Problem] = lambda problem: problem


def choose(steps: int, segment: int, options: Options, device: str, demand: Demand, beside: Beside = ALONE) -> Choice:
    """The fastest choice that meets the budget, of which a recurrence gets what is ``beside`` it leaves.

    Raises BudgetError if no choice meets it; it says the least that would, and with which schedule.
    """
    problem = Problem(steps, segment, max(demand.carry, 1), max(demand.tape, 1), tier=default_tier(options, device))
    budget = parse_budget(options.memory_budget) if beside.budget is None else beside.budget
    if options.schedule == "hrevolve" or (budget is not None and _may_move(options)):
        problem = demand.moving(problem)
    preferred = _preferred(problem, options, demand.replay)
    if budget is None:
        return preferred
    if isinstance(budget, float):
        budget = int(budget * beside.needed(demand.peak(Choice("store_all", problem))))
    allowed = beside.allowed(budget)
    least: tuple[int, Choice] | None = None
    for candidate in _in_time(preferred, options, allowed - demand.scratch, demand):
        need = demand.peak(candidate)
        if need <= allowed:
            return replace(candidate, allowed=allowed)
        if least is None or need < least[0]:
            least = (need, candidate)
    assert least is not None
    needed = beside.needed(least[0])
    further = _further(options, problem, demand.waiting)
    around = f" ({beside.around:,} of them around the loop)" if beside.around else ""
    refusal = BudgetError(
        f"memory_budget={options.memory_budget!r} ({budget:,} bytes) is below the least that this network needs: "
        f"{needed:,} bytes{around}, with schedule {least[1].describe()}. "
        f"{'Free memory' if options.automatic_budget else 'Raise the budget'}{further}."
    )
    refusal.nbytes = needed
    raise refusal


def _preferred(problem: Problem, options: Options, replay: bool) -> Choice:
    """What is chosen without a budget."""
    schedule = "standard" if options.schedule == "auto" else options.schedule
    if replay and options.schedule == "auto" and options.chunk is None:
        schedule = "store_all"
    numbers = find(schedule).numbers
    steps, carry, tape = problem.steps, problem.carry, max(problem.tape // problem.segment, 1)
    chunk, slots = best_chunk(steps, carry, tape), options.slots
    if "chunk" in numbers and "slots" in numbers:
        if problem.tier == "local":
            chunk, slots = best_local_double(steps, carry, tape)
        chunk = min(options.chunk or chunk, steps)
        if options.chunk is not None or problem.tier != "local":
            slots = best_slots(chunk, carry, tape)
        slots = min(options.slots or slots or 1, chunk)
    return Choice(schedule, replace(problem, chunk=min(options.chunk or chunk, steps), slots=slots))


_OPTIMAL = ("revolve", "hrevolve")


def _may_move(options: Options) -> bool:
    """Whether a budget may be met by moving carries to a tier that was named."""
    moving = bool(options.tiers) and "local" not in options.tiers
    return options.schedule == "auto" and options.chunk is None and moving


def _in_time(preferred: Choice, options: Options, memory: int, demand: Demand) -> Iterator[Choice]:
    """All candidates, then those that move carries once more, without room for a block that is read ahead: reading
    then takes time of its own."""
    yield from _candidates(preferred, options, memory, demand.waiting)
    for candidate in _candidates(preferred, options, memory, max(demand.waiting - demand.carry, 0)):
        if "remote" in find(candidate.schedule).numbers and candidate.problem.tier != "local":
            yield replace(candidate, ahead=False)


def _candidates(preferred: Choice, options: Options, memory: int, waiting: int) -> Iterator[Choice]:
    """Choices in the order of their cost: fewer steps run again, then fewer transfers. ``memory``: for carries and
    tapes, and for carries on their way, ``waiting`` bytes."""
    schedule, problem = preferred.schedule, replace(preferred.problem, memory=memory)
    if options.schedule == "auto" and options.chunk is None:
        yield Choice("store_all", problem)
        yield from _optima(_OPTIMAL if _may_move(options) else _OPTIMAL[:1], replace(problem, slots=None), waiting)
        return
    if schedule in _OPTIMAL and problem.slots is None:
        yield from _optima([schedule], problem, waiting)
        return
    numbers = find(schedule).numbers
    if "chunk" not in numbers:
        yield Choice(schedule, problem)
        return
    chunk = problem.chunk or 1
    chunks = [chunk] if options.chunk else _spread(chunk, problem.steps, problem.segment)
    for chunk in chunks:
        nested = "slots" in numbers and not options.slots
        slots = _spread(problem.slots or 1, chunk, 1) if nested else [problem.slots or 1]
        for number in slots:
            yield Choice(schedule, replace(problem, chunk=chunk, slots=min(number, chunk)))


def _optima(schedules: Sequence[str], problem: Problem, waiting: int) -> Iterator[Choice]:
    """Optimal schedules for the memory of a problem, the cheapest first; then for the least memory that they need."""
    least = least_memory(problem)
    choices = {
        "revolve": Choice("revolve", problem),
        "hrevolve": Choice("hrevolve", replace(problem, memory=(problem.memory or 0) - waiting)),
    }
    lowest = {"revolve": least, "hrevolve": problem.carry + problem.tape}
    feasible = [name for name in schedules if (choices[name].problem.memory or 0) >= lowest[name]]
    yield from (choices[name] for name in sorted(feasible, key=lambda name: extra_runs(name, choices[name].problem)))
    yield from (Choice(name, replace(problem, memory=lowest[name])) for name in schedules)


def _spread(middle: int, most: int, least: int) -> list[int]:
    """Numbers in [least, most], near ``middle`` first."""
    factors = (1.0, 0.7, 1.4, 0.5, 2.0, 0.35, 2.8, 0.25, 4.0, 0.12, 8.0, 0.0)
    return list(dict.fromkeys(min(max(round(middle * factor), least), most) for factor in factors))


def _further(options: Options, problem: Problem, waiting: int) -> str:
    """What else would help, for the end of a sentence: not a tier for which as many carries wait as revolve holds."""
    if options.schedule == "auto" and not options.tiers:
        lower = problem.carry + problem.tape + waiting < least_memory(problem)
        return ", or allow a remote tier with remote='disk'" if lower else ""
    if options.schedule in ("store_all", "standard"):
        return ", or use schedule='double'"
    return "" if options.segment is None else ", or compile shorter segments with segment=1"
