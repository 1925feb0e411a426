"""Plans that a planner weighed against each other: what other schedules would take in place of the chosen one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from reroll.errors import RerollError
from reroll.planning.choice import Choice, may_move
from reroll.planning.options import Options
from reroll.planning.plan import Demand, Plan
from reroll.program.timeline import trace
from reroll.schedules.interval import best_chunk, best_slots
from reroll.schedules.machine import Costs
from reroll.schedules.named import find, least_memory
from reroll.schedules.problem import Problem

_LEVELS = 5
_MANY = 2_000  # pieces of a sequence from which on an alternative is not worth the time to look at it


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan by its name: predicted local ``peak`` in bytes, ``seconds`` of its program in time, ``rerun`` steps.

    ``tiers``: bytes at the peak of each remote tier. ``chosen``: whether this is the plan that was taken.
    """

    name: str
    peak: int
    seconds: float
    rerun: int
    tiers: Mapping[str, int] = field(default_factory=dict)
    chosen: bool = False


def pareto(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Those that no other beats in bytes without losing in seconds, the smallest peak first (the Pareto curve)."""
    found: list[Alternative] = []
    for each in sorted(alternatives, key=lambda each: (each.peak, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return found


def alternatives(plan: Plan, demand: Demand, options: Options, costs: Costs) -> tuple[Alternative, ...]:
    """The chosen plan, and what plain BPTT, standard and the optimum for several sizes of memory would take; where
    carries may be moved, remote, double and the optimum over two tiers too."""
    found = [replace(_alternative(plan, demand, costs), chosen=True)]
    chosen = plan.choice.describe()
    tape = max(demand.tape, 1)  # of whole tapes, also where they are thin
    whole = replace(plan.choice, problem=replace(plan.choice.problem, tape=tape))
    choices = (replace(each, ahead=plan.choice.ahead) for each in _choices(whole, options, costs))
    for name, choice in {each.describe(): each for each in choices}.items():
        if name == chosen or len(choice.root.children) > _MANY:
            continue
        try:
            planned = demand.plan(choice)
        except RerollError:  # a pass of the user's own may be made for another schedule
            continue
        other = _alternative(planned, demand, costs)
        found += [other] if other.tiers or "remote" not in find(choice.schedule).numbers else []  # revolve's, else
    return tuple(found)


def may_move_carries(choice: Choice, options: Options) -> bool:
    """Whether the chosen schedule, or others that were weighed against it, move carries to a tier."""
    return "remote" in find(choice.schedule).numbers or may_move(options)


def _choices(chosen: Choice, options: Options, costs: Costs) -> Iterator[Choice]:
    moving = may_move_carries(chosen, options)
    problem, tape = chosen.problem, max(chosen.problem.tape // chosen.segment, 1)
    chunk = problem.whole(best_chunk(problem.steps, problem.carry, tape))
    yield Choice("store_all", problem)
    yield Choice("standard", replace(problem, chunk=chunk))
    if moving:
        slots = min(best_slots(chunk, problem.carry, tape), chunk)
        yield Choice("remote", replace(problem, chunk=chunk))
        yield Choice("double", replace(problem, chunk=chunk, slots=slots))
    for memory in _memories(problem):
        yield Choice("revolve", replace(problem, memory=memory, slots=None))
    if moving and problem.tier != "local":
        moved = problem.moving(costs.machine.tier(problem.tier), costs.of(chosen.segment).forward)
        for memory in _memories(problem):
            yield Choice("hrevolve", replace(moved, memory=memory, slots=None))


def _memories(problem: Problem) -> Iterator[int]:
    """Sizes of memory from the least to nearly all tapes, each the same factor larger."""
    low, high = least_memory(problem), problem.segments * problem.tape
    for level in range(_LEVELS):
        yield round(low * (high / low) ** (level / _LEVELS))


def _alternative(plan: Plan, demand: Demand, costs: Costs) -> Alternative:
    seconds = trace(plan.program, demand.needs, costs).seconds
    tally = plan.tally
    return Alternative(
        plan.choice.describe(), plan.prediction.peak, seconds, tally.reforward_steps, dict(tally.tier_peaks)
    )
