"""Plans of made-up sizes: nothing is compiled."""

from dataclasses import FrozenInstanceError

import pytest

from planned import demand_of, needs, peak_of
from reroll.errors import BudgetError
from reroll.planning.choice import Choice
from reroll.planning.choose import BudgetContext, choose
from reroll.planning.options import Options
from reroll.planning.plan import Demand, Plan
from reroll.program.memory import OuterMemory
from reroll.program.verifier import verify
from reroll.schedules.problem import Problem
from toy import play, reference

STEPS, SEGMENT, CARRY, TAPE, SCRATCH = 64, 4, 30, 200, 50


def demand() -> Demand:
    return demand_of(STEPS, needs(SEGMENT, CARRY, TAPE, SCRATCH), "sparsity,save,recompute,offload,prefetch")


def test_a_plan_holds_a_legal_program_of_its_choice_and_what_that_takes() -> None:
    known = demand()
    plan = choose(known, Options(schedule="double", remote="disk", chunk=16, slots=2))
    assert (plan.choice.schedule, plan.choice.steps, plan.choice.segment) == ("double", STEPS, SEGMENT)
    assert plan.tally == verify(plan.program, sizes=known.needs.sizes)
    assert plan.tally.carries_written == STEPS // 16
    assert plan.prediction.peak == peak_of(known, plan.choice)
    assert plan.context.root == plan.choice.root
    assert play(plan.program) == reference(STEPS)


@pytest.mark.parametrize("budget", [900, 1_500, 3_000, 10_000])
def test_a_plan_keeps_to_its_budget(budget: int) -> None:
    plan = choose(demand(), Options(memory_budget=budget), BudgetContext(around=OuterMemory(40, 60, 100)))
    assert plan.prediction.forward.nbytes <= budget - 40
    assert plan.prediction.backward.nbytes <= budget - 100
    assert plan.choice.allowed == budget - 100
    assert play(plan.program) == reference(STEPS)


def test_a_budget_is_a_fraction_of_plain_bptt() -> None:
    plain = choose(demand(), Options(schedule="store_all"))
    half = choose(demand(), Options(memory_budget=0.5))
    assert half.choice.allowed == plain.prediction.peak // 2
    assert half.prediction.peak <= plain.prediction.peak // 2
    assert half.tally.reforward_steps > plain.tally.reforward_steps == 0


def test_a_refusal_names_a_budget_that_is_enough() -> None:
    with pytest.raises(BudgetError, match="below the least that this network needs") as refused:
        choose(demand(), Options(memory_budget=100))
    assert choose(demand(), Options(memory_budget=refused.value.nbytes)).prediction.peak == refused.value.nbytes


def test_what_moving_costs_is_asked_for_only_where_carries_may_move() -> None:
    asked: list[Problem] = []

    def moving(problem: Problem) -> Problem:
        asked.append(problem)
        return problem

    known = demand_of(STEPS, needs(SEGMENT, CARRY, TAPE, SCRATCH), moving=moving)
    choose(known, Options(memory_budget=3_000))
    assert not asked
    choose(known, Options(memory_budget=3_000, remote="disk"))
    assert [each.tier for each in asked] == ["disk"]


def test_a_choice_without_room_to_read_ahead_is_not_read_ahead() -> None:
    problem = Problem(STEPS, SEGMENT, CARRY, TAPE, chunk=16, slots=2, tier="disk")
    ahead, late = (demand().plan(Choice("double", problem, ahead=each)) for each in (True, False))
    assert (ahead.context.ahead, late.context.ahead) == (True, False)
    assert late.tally.local_peak < ahead.tally.local_peak


def test_a_plan_is_frozen() -> None:
    plan = choose(demand(), Options())
    assert isinstance(plan, Plan)
    with pytest.raises(FrozenInstanceError):
        plan.tally = None  # type: ignore[misc,assignment]
