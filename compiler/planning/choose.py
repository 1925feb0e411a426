"""From options and sizes to a plan: segment, chunk, slots, tier, and the tree of intervals that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

from reroll.errors import BudgetError
from reroll.planning.choice import OPTIMAL, Choice, candidates, may_move, preferred
from reroll.planning.options import Options, parse_budget
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
    carries and tapes, ``waiting`` of carries that wait to be written, or were read ahead, ``reversing``: what the
    backward of a whole segment needs besides. ``peak``: the predicted local peak of a choice. ``replay``: tapes are so
    small that no step need run again. ``moving``: gives a problem what it costs to move carries.
    """

    carry: int
    tape: int
    scratch: int
    peak: Callable[[Choice], int]
    replay: bool = False
    waiting: int = 0
    reversing: int = 0
    moving: Callable[[Problem], Problem] = lambda problem: problem

    def bound(self, choice: Choice) -> int:
        """Bytes that a choice needs at least, without its program: some tape is complete when its backward begins."""
        if choice.schedule in OPTIMAL:
            return 0  # made for the memory that there is
        problem = choice.problem
        short = problem.tape if problem.steps % problem.segment else 0  # whose share of a tape is not exact
        return counted(choice.root, problem).local_peak + self.reversing - problem.carry - short


def choose(steps: int, segment: int, options: Options, device: str, demand: Demand, beside: Beside = ALONE) -> Choice:
    """The fastest choice that meets the budget, of which a recurrence gets what is ``beside`` it leaves.

    Raises BudgetError if no choice meets it; it says the least that would, and with which schedule.
    """
    problem = Problem(steps, segment, max(demand.carry, 1), max(demand.tape, 1), tier=default_tier(options, device))
    budget = parse_budget(options.memory_budget) if beside.budget is None else beside.budget
    if options.schedule == "hrevolve" or (budget is not None and may_move(options)):
        problem = demand.moving(problem)
    first = preferred(problem, options, demand.replay)
    if budget is None:
        return first
    if isinstance(budget, float):
        budget = int(budget * beside.needed(demand.peak(Choice("store_all", problem))))
    allowed = beside.allowed(budget)
    offered = candidates(first, options, allowed - demand.scratch, demand.waiting, demand.carry)
    need, choice = _first_within(offered, allowed, demand)
    if need <= allowed:
        return replace(choice, allowed=allowed)
    needed = beside.needed(need)
    further = _further(options, problem, demand.waiting)
    around = f" ({beside.around:,} of them around the loop)" if beside.around else ""
    refusal = BudgetError(
        f"memory_budget={options.memory_budget!r} ({budget:,} bytes) is below the least that this network needs: "
        f"{needed:,} bytes{around}, with schedule {choice.describe()}. "
        f"{'Free memory' if options.automatic_budget else 'Raise the budget'}{further}."
    )
    refusal.nbytes = needed
    raise refusal


def _first_within(choices: Iterable[Choice], allowed: int, demand: Demand) -> tuple[int, Choice]:
    """The first choice that needs no more bytes than are allowed, else the one that needs the least; and its need.

    No program is made of choices that are known to need more.
    """
    needs, left = list[tuple[int, int, Choice]](), list[tuple[int, int, Choice]]()
    for number, choice in enumerate(choices):
        bound = demand.bound(choice)
        if bound > allowed:
            left.append((bound, number, choice))
            continue
        needs.append((demand.peak(choice), number, choice))
        if needs[-1][0] <= allowed:
            return needs[-1][0], choice
    for bound, number, choice in sorted(left, key=itemgetter(0, 1)):
        if needs and bound >= min(needs, key=itemgetter(0, 1))[0]:
            break
        needs.append((demand.peak(choice), number, choice))
    need, _, choice = min(needs, key=itemgetter(0, 1))
    return need, choice


def _further(options: Options, problem: Problem, waiting: int) -> str:
    """What else would help, for the end of a sentence: not a tier for which as many carries wait as revolve holds."""
    if options.schedule == "auto" and not options.tiers:
        lower = problem.carry + problem.tape + waiting < least_memory(problem)
        return ", or allow a remote tier with remote='disk'" if lower else ""
    if options.schedule in ("store_all", "standard"):
        return ", or use schedule='double'"
    return "" if options.segment is None else ", or compile shorter segments with segment=1"
