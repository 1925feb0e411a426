"""From options and sizes to a plan: chunk, slots, tier, and the tree of intervals that they give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from reroll.errors import BudgetError
from reroll.planning.choice import OPTIMAL, Choice, candidates, cost, lowest, may_move, preferred
from reroll.planning.options import Options, parse_budget
from reroll.planning.plan import Demand, Plan
from reroll.program.memory import NOTHING, OuterMemory, Prediction
from reroll.schedules.counts import counted
from reroll.schedules.machine import REMOTE_TIERS
from reroll.schedules.named import least_memory
from reroll.schedules.problem import Problem


def default_tier(options: Options, device: str) -> str:
    """The remote tier: the one asked for, else host RAM for a GPU and disk for a CPU."""
    if options.tiers:
        return options.tiers[0]
    home = "cpu" if device == "cpu" else "device"
    return next(tier.name for tier in REMOTE_TIERS.values() if tier.default_of == home)


@dataclass(frozen=True, slots=True)
class BudgetContext:
    """What shares a budget with a recurrence: what is ``around`` the recurrences of its graph, and the bytes that the
    ``others`` before it keep for their backward. ``budget``: bytes in place of the option's."""

    around: OuterMemory = NOTHING
    others: int = 0
    budget: int | None = None

    def allowed(self, budget: int, prediction: Prediction) -> int:
        """Local bytes that a budget leaves a recurrence where it needs most."""
        return budget - self.others - self.around.beside(prediction)

    def needed(self, prediction: Prediction) -> int:
        """The least budget for a recurrence."""
        return self.around.needed(prediction) + self.others


ALONE = BudgetContext()


def choose(demand: Demand, options: Options, beside: BudgetContext = ALONE) -> Plan:
    """The plan of the fastest choice that meets the budget, of which a recurrence gets what is ``beside`` it leaves.

    Raises BudgetError if no choice meets it; it says the least that would, and with which schedule.
    """
    demand = replace(demand, needs=demand.needs.within(beside.around))
    tier = default_tier(options, demand.device)
    problem = Problem(demand.steps, demand.segment, max(demand.carry, 1), max(demand.tape, 1), tier=tier)
    budget = parse_budget(options.memory_budget) if beside.budget is None else beside.budget
    if options.schedule == "hrevolve" or (budget is not None and may_move(options)):
        problem = demand.moving(problem)
    first = preferred(problem, options, demand.replay)
    if budget is None:
        return demand.plan(first)
    if isinstance(budget, float):
        budget = int(budget * beside.needed(demand.plan(Choice("store_all", problem)).prediction))
    left = budget - beside.others - beside.around.reversing - demand.needs.scratch  # most is needed in a reversal
    usual = candidates(first, options, left, demand.waiting, demand.carry, demand.thinning)
    found = _first_within(_Turns(usual, lowest(first, options)), budget, demand, beside)
    needed = beside.needed(found.prediction)
    if needed <= budget:
        return found.within(beside.allowed(budget, found.prediction))
    held = beside.around.at_peak(found.prediction)[1]
    around = f" ({held:,} of them around the loop)" if held else ""
    refusal = BudgetError(
        f"memory_budget={options.memory_budget!r} ({budget:,} bytes) is below the least that this network needs: "
        f"{needed:,} bytes{around}, with schedule {found.choice.describe()}. "
        f"{way_out(options, problem, demand.waiting, None if beside.budget else needed / max(budget, 1))}"
    )
    refusal.nbytes = needed
    raise refusal


class _Turns:
    """Choices in turn: the usual ones, each behind those that wait and cost less, then all that wait; each once."""

    def __init__(self, usual: Iterable[Choice], waiting: Iterable[Choice]) -> None:
        self.usual, self.numbers, self.waiting = usual, count(), list[tuple[float, int, Choice]]()
        for each in waiting:
            self.put(each)

    def put(self, choice: Choice) -> None:
        """A choice that waits."""
        heappush(self.waiting, (cost(choice), next(self.numbers), choice))

    def __iter__(self) -> Iterator[Choice]:
        seen = set[Choice]()
        for choice in self._all():
            if choice not in seen:
                seen.add(choice)
                yield choice

    def _all(self) -> Iterator[Choice]:
        for choice in self.usual:
            own = cost(choice) if self.waiting else 0.0
            while self.waiting and self.waiting[0][0] < own:
                yield heappop(self.waiting)[-1]
            yield choice
        while self.waiting:
            yield heappop(self.waiting)[-1]


def _smaller(choice: Choice, excess: int) -> Choice | None:
    """The choice of the same schedule for the next tree that may need so many bytes less, if it is made for memory."""
    problem = choice.problem
    if choice.schedule not in OPTIMAL or problem.memory is None or problem.slots is not None:
        return None
    used = counted(choice.root, problem).local_peak
    memory = min(problem.memory - excess, used - 1)
    least = least_memory(problem) if choice.schedule == "revolve" else problem.carry + problem.tape
    return replace(choice, problem=replace(problem, memory=memory)) if memory >= least else None


def _first_within(turns: _Turns, budget: int, demand: Demand, beside: BudgetContext) -> Plan:
    """The plan of the cheapest choice that meets a budget with what is beside it, else of the one that needs the least.

    What is left for carries and tapes is an estimate: a choice that does not fit waits with what it needs too much
    taken off until no other costs less. No program is made of choices that are known to need more.
    """
    before = beside.others + beside.around.reversing
    found: tuple[int, int, Plan] | None = None
    left: list[tuple[int, int, Choice]] = []
    for number, choice in enumerate(turns):
        bound = demand.bound(choice) + before
        if bound > budget:
            left.append((bound, number, choice))
            continue
        plan = demand.plan(choice)
        needed = beside.needed(plan.prediction)
        if needed <= budget:
            return plan
        found = _lesser(found, (needed, number, plan))
        smaller = _smaller(choice, needed - budget)
        if smaller is not None:
            turns.put(smaller)
    for bound, number, choice in sorted(left, key=itemgetter(0, 1)):
        if found and bound >= found[0]:
            break
        plan = demand.plan(choice)
        found = _lesser(found, (beside.needed(plan.prediction), number, plan))
    assert found is not None, "there is a choice for every problem"
    return found[2]


def _lesser(found: tuple[int, int, Plan] | None, other: tuple[int, int, Plan]) -> tuple[int, int, Plan]:
    """The one that needs less, of equal ones that which comes first."""
    return other if found is None else min(found, other, key=itemgetter(0, 1))


def way_out(options: Options, problem: Problem, waiting: int, times: float | None) -> str:
    """What to do where no choice meets a budget; ``times`` that would be enough, where that is known."""
    first = "Free memory" if options.automatic_budget else f"Raise the budget{_enough(options, times)}"
    return f"{first}{_further(options, problem, waiting)}."


def _enough(options: Options, times: float | None) -> str:
    """Which part of plain's memory would do, where the budget is a part: what does not grow with the number of steps is
    a greater part of few."""
    part = options.memory_budget
    if times is None or not isinstance(part, float):
        return ""
    enough = math.ceil(100 * part * times) / 100
    if enough > 1:
        return " (in bytes: with this schedule no part of plain's is enough)"
    return f" to {enough} or more (with more steps a smaller part will do)"


def _further(options: Options, problem: Problem, waiting: int) -> str:
    """What else would help, for the end of a sentence: not a tier for which as many carries wait as revolve holds."""
    if options.schedule == "auto" and not options.tiers:
        lower = problem.carry + problem.tape + waiting < least_memory(problem)
        return ", or allow a remote tier with remote='disk'" if lower else ""
    if options.schedule in ("store_all", "standard"):
        return ", or use schedule='double'"
    return "" if options.segment is None else ", or compile shorter segments with segment=1"
