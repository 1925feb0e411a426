"""Plans of several recurrences of a graph that meet one budget: each gets what a byte is worth in it.

A few plans are made of each, from the one that needs least to plain's; which is taken of each,
``planning.shared_budget`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from reroll.backends.construct.plan import Built
from reroll.errors import BudgetError
from reroll.graph.work import work
from reroll.planning.choice import Choice, steps_run
from reroll.planning.choose import BudgetContext, way_out
from reroll.planning.options import Options
from reroll.planning.plan import Plan
from reroll.planning.shared_budget import Offer, cheapest, least
from reroll.program.memory import OuterMemory

_RUNGS = 8  # plans between the least and plain's, each with as many times more bytes than the one before
_FINER = 4  # further plans between a plan that was chosen and the next


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A recurrence whose plan is not decided: ``within`` makes the fastest with segments of a length within local
    bytes, or raises BudgetError. ``lengths`` that may be tried, the usual first; ``around``: what is held around it."""

    lengths: Sequence[int]
    around: OuterMemory
    within: Callable[[int, int], Built]


def share_out(shares: Sequence[Share], options: Options, budget: int | float) -> list[Built]:
    """The plans of the recurrences of one graph, in the order in which they run, of the least cost within a budget.

    budget: bytes, or a fraction of what plain BPTT holds. Raises BudgetError, which says the least that would do.
    """
    if isinstance(budget, float):
        plain = [[replace(each, plan=plain_plan(each))] for each in map(_at_ease, shares)]
        budget = int(budget * least(_offers(shares, plain)))
    at_ease = [made for each in shares if (made := _within(each, each.lengths[0], budget - each.around.reversing))]
    if len(at_ease) == len(shares) and _chosen(shares, [[each] for each in at_ease], budget):
        return _shared(shares, at_ease, options, budget)
    plans = [list(_ladder(each, each.lengths[0])) for each in shares]
    found = _chosen(shares, plans, budget)
    if found is None:
        for each, mine in zip(shares, plans, strict=True):
            mine += (built for length in each.lengths[1:] for built in _ladder(each, length))
        found = _chosen(shares, plans, budget)
    if found is None:
        raise _refusal(shares, plans, options, budget)
    return _shared(shares, _finer(shares, plans, found, budget), options, budget)


def beside_each_other(built: Sequence[Built]) -> list[Built]:
    """The plans, each with what those before it keep while it runs."""
    made, others = [], 0
    for each in built:
        made.append(replace(each, beside=replace(each.beside, others=others)))
        others += each.plan.prediction.turned
    return made


def _shared(shares: Sequence[Share], built: Sequence[Built], options: Options, budget: int) -> list[Built]:
    """The plans that were chosen, with what they had to meet."""
    own = budget if options.automatic_budget else None
    placed = [
        replace(each, beside=BudgetContext(share.around, 0, own)) for share, each in zip(shares, built, strict=True)
    ]
    return [
        replace(each, plan=each.plan.within(each.beside.allowed(budget, each.plan.prediction)))
        for each in beside_each_other(placed)
    ]


def _within(share: Share, length: int, nbytes: int) -> Built | None:
    with suppress(BudgetError):
        return share.within(length, nbytes)
    return None


def _at_ease(share: Share) -> Built:
    return share.within(share.lengths[0], 1 << 62)


def plain_plan(built: Built) -> Plan:
    """The plan of the same kernels that keeps all tapes."""
    return built.demand.plan(Choice("store_all", built.choice.problem))


def _ladder(share: Share, length: int) -> Iterator[Built]:
    """Plans with segments of a length: the one that needs least, and some up to plain's."""
    try:
        lowest = share.within(length, 1)
    except BudgetError as error:
        lowest = share.within(length, error.nbytes)
    yield lowest
    low = lowest.plan.prediction.peak
    growth = max(plain_plan(lowest).prediction.peak / low, 1.0)
    yield from _rungs(share, length, [int(low * growth ** (rung / _RUNGS)) + 1 for rung in range(1, _RUNGS + 1)])


def _rungs(share: Share, length: int, sizes: Sequence[int]) -> Iterator[Built]:
    """The plans within some sizes, each once."""
    seen = set[tuple[int, int]]()
    for nbytes in sizes:
        built = _within(share, length, nbytes)
        if built is not None:
            key = built.plan.prediction.peak, built.plan.prediction.turned
            if key not in seen:
                seen.add(key)
                yield built


def _finer(
    shares: Sequence[Share], plans: Sequence[Sequence[Built]], found: Sequence[Built], budget: int
) -> list[Built]:
    """The plans that are chosen where each recurrence may also have some between its own and the next larger one."""
    more = []
    for share, mine, built in zip(shares, plans, found, strict=True):
        low = built.plan.prediction.peak
        high = min((peak for each in mine if (peak := each.plan.prediction.peak) > low), default=low)
        sizes = [low + (high - low) * part // (_FINER + 1) for part in range(1, _FINER + 1)] if high > low else []
        more.append([built, *_rungs(share, built.choice.segment, sizes)])
    chosen = _chosen(shares, more, budget)
    assert chosen is not None, "what was found is among them"
    return chosen


def _chosen(shares: Sequence[Share], plans: Sequence[Sequence[Built]], budget: int) -> list[Built] | None:
    numbers = cheapest(_offers(shares, plans), budget)
    return None if numbers is None else [mine[number] for mine, number in zip(plans, numbers, strict=True)]


def _offers(shares: Sequence[Share], plans: Sequence[Sequence[Built]]) -> list[list[Offer]]:
    """What the plans of each recurrence need and cost; those with segments of one length share their kernels."""
    traced = {built.kernels.traced for mine in plans for built in mine}
    weights = {each: work(each.graph.graph) / each.steps for each in traced}

    def offer(share: Share, built: Built) -> Offer:
        prediction, cost = built.plan.prediction, steps_run(built.plan.choice) * weights[built.kernels.traced]
        return Offer(share.around.needed(prediction), prediction.turned, cost)

    return [[offer(share, built) for built in mine] for share, mine in zip(shares, plans, strict=True)]


def _refusal(shares: Sequence[Share], plans: Sequence[Sequence[Built]], options: Options, budget: int) -> BudgetError:
    needed = least(_offers(shares, plans))
    found = _chosen(shares, plans, needed)
    assert found is not None
    around = max(share.around.at_peak(built.plan.prediction)[1] for share, built in zip(shares, found, strict=True))
    schedules = ", ".join(f"{each.choice.describe()} for {each.name}" for each in found)
    problems = ((each.choice.problem, each.demand.waiting) for each in found)
    advice = max((way_out(options, *each, needed / max(budget, 1)) for each in problems), key=len)
    error = BudgetError(
        f"memory_budget={options.memory_budget!r} ({budget:,} bytes) is below the least that the {len(plans)} loops of "
        f"this network need together: {needed:,} bytes (up to {around:,} of them around the loops), with "
        f"{schedules}. {advice}"
    )
    error.nbytes = needed
    return error
