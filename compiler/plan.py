"""From options and sizes to a plan: segment, chunk, slots, tier, and the tree of intervals that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from reroll.errors import BudgetError
from reroll.footprint import result_nbytes
from reroll.options import REMOTE_SCHEDULES, Options, parse_budget
from reroll.recurrence import Recurrence
from reroll.schedule import Interval, best_chunk, best_local_double, best_slots
from reroll.schedules import Problem, tree

_SEGMENT = {"inductor": 8, "eager": 4}
_SMALL = ((4096, 32), (8192, 16))  # bytes that a step makes, and steps for which calling a segment no longer counts
_MANY, _OPERATIONS = 512, 256  # steps from which on they are worth compiling, operations in one of them at most


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule with its numbers, in steps; ``tier`` is where chunk starts go."""

    schedule: str
    steps: int
    segment: int
    chunk: int
    slots: int
    tier: str

    @property
    def root(self) -> Interval:
        """Where carries are kept."""
        problem = Problem(self.steps, self.segment, chunk=self.chunk, slots=self.slots, tier=self.tier)
        return tree(self.schedule, problem)

    def describe(self) -> str:
        """The schedule and the numbers that it uses."""
        numbers = {"segment": self.segment}
        if self.schedule != "store_all":
            numbers["chunk"] = self.chunk
        if self.schedule in ("hierarchical", "double"):
            numbers["slots"] = self.slots
        named = ", ".join(f"{name} {number}" for name, number in numbers.items())
        return f"{self.schedule} ({named}" + (f", {self.tier})" if self.schedule in REMOTE_SCHEDULES else ")")


def usual_segment(recurrence: Recurrence, options: Options) -> int:
    """Steps compiled together if nobody says otherwise: more where there are many that take less time than a call.

    Not so for schedules that are chosen where every byte counts.
    """
    usual = _SEGMENT[options.lowering]
    if options.lowering == "eager" or options.schedule in REMOTE_SCHEDULES or recurrence.steps < _MANY:
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


def choose(
    steps: int,
    segment: int,
    options: Options,
    device: str,
    carry: int,
    tape: int,
    peak: Callable[[Choice], int],
    *,
    replay: bool = False,
) -> Choice:
    """The choice for carries of ``carry`` bytes and taped steps of ``tape`` bytes.

    peak: predicted local bytes of a choice. replay: the tape is so small that no step need run again. Raises
    BudgetError if no choice meets the budget; it says the least that would, and with which schedule.
    """
    tier = default_tier(options, device)
    preferred = _preferred(steps, segment, options, tier, carry, tape)
    if replay and options.schedule == "auto" and options.chunk is None:
        preferred = replace(preferred, schedule="store_all")
    if options.memory_budget is None:
        return preferred
    budget = parse_budget(options.memory_budget)
    if isinstance(budget, float):
        budget = int(budget * peak(replace(preferred, schedule="store_all")))
    assert budget is not None
    least: tuple[int, Choice] | None = None
    for candidate in _candidates(preferred, options):
        need = peak(candidate)
        if need <= budget:
            return candidate
        if least is None or need < least[0]:
            least = (need, candidate)
    assert least is not None
    refusal = BudgetError(
        f"memory_budget={options.memory_budget!r} ({budget:,} bytes) is below the least that this network needs: "
        f"{least[0]:,} bytes, with schedule {least[1].describe()}. Raise the budget{_further(options)}."
    )
    refusal.nbytes = least[0]
    raise refusal


def _preferred(steps: int, segment: int, options: Options, tier: str, carry: int, tape: int) -> Choice:
    schedule = "standard" if options.schedule == "auto" else options.schedule
    chunk, slots = best_chunk(steps, max(carry, 1), max(tape, 1)), 1
    if schedule == "double" and tier == "local":
        chunk, slots = best_local_double(steps, max(carry, 1), max(tape, 1))
    elif schedule in ("hierarchical", "double"):
        slots = best_slots(chunk, max(carry, 1), max(tape, 1))
    chunk = min(options.chunk or chunk, steps)
    if options.chunk is not None and schedule in ("hierarchical", "double") and tier != "local":
        slots = best_slots(chunk, max(carry, 1), max(tape, 1))
    return Choice(schedule, steps, segment, chunk, min(options.slots or slots, chunk), tier)


def _candidates(preferred: Choice, options: Options) -> Iterator[Choice]:
    """Choices in the order of their cost: fewer steps run again, then fewer transfers."""
    schedules = [preferred.schedule]
    if options.schedule == "auto":
        schedules = ["store_all", "standard", *(("remote", "double") if options.tiers else ())]
    for schedule in schedules:
        fixed = options.chunk is not None or schedule == "store_all"
        chunks = [preferred.chunk] if fixed else _spread(preferred.chunk, preferred.steps, preferred.segment)
        for chunk in chunks:
            nested = schedule in ("hierarchical", "double")
            slots = [preferred.slots] if options.slots or not nested else _spread(preferred.slots, chunk, 1)
            for number in slots:
                yield replace(preferred, schedule=schedule, chunk=chunk, slots=min(number, chunk))


def _spread(middle: int, most: int, least: int) -> list[int]:
    """Numbers in [least, most], near ``middle`` first."""
    factors = (1.0, 0.7, 1.4, 0.5, 2.0, 0.35, 2.8, 0.25, 4.0, 0.12, 8.0, 0.0)
    return list(dict.fromkeys(min(max(round(middle * factor), least), most) for factor in factors))


def _further(options: Options) -> str:
    if options.schedule == "auto" and not options.tiers:
        return ", or allow a remote tier with remote='disk'"
    if options.schedule in ("store_all", "standard"):
        return ", or use schedule='double'"
    return "" if options.segment is None else ", or compile shorter segments with segment=1"
