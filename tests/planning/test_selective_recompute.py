"""Thin tapes under a budget: as many blocks as it asks for, never a slower plan than without them, never above it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from planned import demand_of, needs
from reroll.errors import BudgetError
from reroll.passes import DEFAULT_PASSES
from reroll.planning.choice import Choice, steps_run
from reroll.planning.choose import choose
from reroll.planning.options import Options
from reroll.planning.plan import Demand
from reroll.program.memory import SegmentBytes
from reroll.schedules.interval import Interval, thinned
from reroll.schedules.problem import Problem

PASSES = ",".join(DEFAULT_PASSES)
BLOCKS = {"steps": st.integers(1, 40), "segment": st.integers(1, 3), "carry": st.integers(1, 40)}
BLOCKS |= {"tape": st.integers(20, 200), "scratch": st.integers(0, 100)}
COSTS = {"part": st.floats(0.1, 0.7), "repeats": st.floats(0.05, 0.95), "alone": st.floats(0.5, 1.0)}

LARGE_CARRY: dict[str, float] = {"steps": 2, "segment": 1, "carry": 25, "tape": 20, "scratch": 0}
LARGE_CARRY |= {"part": 0.5, "repeats": 0.5, "alone": 1.0}
SMALL_CARRY = LARGE_CARRY | {"carry": 2, "tape": 22}
"""Revolve in the least memory fits, which the estimate of what is left denies. Thin tapes, which fit, cost more."""


def demands(
    steps: int, segment: int, carry: int, tape: int, scratch: int, part: float, repeats: float, alone: float
) -> tuple[Demand, Demand]:
    """What is known of blocks whose tapes may be thin, and of the same whose tapes may not."""
    held = needs(segment, carry, tape, scratch)
    less = max(int(tape * part), 1)
    of_one = held.segments[segment]
    thin = SegmentBytes(less, of_one.fresh, of_one.kept, of_one.reverse)  # reversing makes all again
    sizes = replace(held.sizes, first=0, thin=lambda low, high: -(-(high - low) // segment) * less)
    known = demand_of(steps, replace(held, sizes=sizes, thin={segment: thin, 1: thin}), PASSES)
    return replace(known, thin=(repeats, alone)), known


def plain(demand: Demand) -> int:
    """The bytes of keeping all."""
    return demand.plan(Choice("store_all", Problem(demand.steps, demand.segment))).prediction.peak


def cost_within(demand: Demand, budget: int) -> float:
    plan = choose(demand, Options(memory_budget=budget))
    assert plan.prediction.peak <= budget
    return steps_run(plan.choice)


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({**BLOCKS, **COSTS}), st.floats(0.3, 1.0))
@example(LARGE_CARRY, 0.9375)
def test_of_all_numbers_of_thin_tapes_none_that_fits_is_cheaper(numbers: dict[str, float], part: float) -> None:
    demand, _ = demands(**numbers)  # type: ignore[arg-type]
    budget = int(part * plain(demand))
    try:
        found = choose(demand, Options(memory_budget=budget))
    except BudgetError:
        return
    assert found.prediction.peak <= budget
    problem = found.choice.problem
    every = range(0, demand.steps + demand.segment, demand.segment)
    offers = [Choice("store_all", problem, thin=min(n, demand.steps), repeats=numbers["repeats"]) for n in every]
    fitting = [steps_run(each) for each in offers if demand.plan(each).prediction.peak <= budget]
    assert all(steps_run(found.choice) <= cost + 1e-9 for cost in fitting)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({**BLOCKS, **COSTS}), st.floats(0.5, 0.95), st.floats(1.0, 1.3))
@example(SMALL_CARRY, 0.5625, 1.0625)
def test_more_bytes_are_never_slower(numbers: dict[str, float], part: float, more: float) -> None:
    demand, _ = demands(**numbers)  # type: ignore[arg-type]
    budget = int(part * plain(demand))
    try:
        before = cost_within(demand, budget)
    except BudgetError:
        return
    assert cost_within(demand, int(budget * more)) <= before + 1e-9


def test_a_tree_is_thin_in_its_first_steps_or_in_all() -> None:
    first, rest = thinned(Interval(8), 3).children
    assert (first.steps, first.thin, rest.steps, rest.thin) == (3, True, 5, False)
    assert first.taped
    assert rest.taped
    (whole,) = thinned(Interval(8), 8).children
    assert whole.thin
    pair = Interval(2, children=(Interval(1), Interval(1, taped=True)))
    nested = thinned(Interval(4, children=(pair, pair)), 4)
    assert nested.children[0] is nested.children[1]  # what is one object stays one
    assert all(leaf.thin for leaf in nested.children[0].children)
    assert not nested.children[0].thin


def test_a_plan_says_how_many_tapes_are_thin() -> None:
    demand, _ = demands(12, 1, 4, 100, 10, 0.2, 0.3, 0.8)
    plan = choose(demand, Options(memory_budget=int(0.7 * plain(demand))))
    assert plan.choice.describe() == "store_all (segment 1, thin tapes of 5)"
    assert [bool(node.kwargs) for node in plan.program.graph.nodes if "tape" in node.name] == [True, False]
    assert plan.tally.reforward_steps == 0
