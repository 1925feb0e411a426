"""Which choices a planner weighs under a budget, and that it finds the best of them without making all programs."""

import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reroll
from networks import RecurrentLIF, spikes
from planned import demand_of, gradients, needs, peak_of
from reroll.backends.runtime.executable import Executable
from reroll.backends.tiers.disk import DiskTier
from reroll.errors import BudgetError
from reroll.planning.choice import Choice, steps_run
from reroll.planning.choose import choose
from reroll.planning.options import Options
from reroll.planning.plan import Demand
from reroll.schedules.interval import Interval
from reroll.schedules.named import least_memory, register_schedule
from reroll.schedules.problem import Problem

PASSES = "sparsity,save,recompute,offload,prefetch,trim"
SIZES = {
    "steps": st.integers(1, 120),
    "segment": st.integers(1, 4),
    "carry": st.integers(1, 40),
    "tape": st.integers(1, 200),
    "scratch": st.integers(0, 200),
    "cost": st.sampled_from([0.1, 1.0, 3.0, 20.0]),
}


def moved_demand(steps: int, segment: int, carry: int, tape: int, scratch: int, cost: float) -> Demand:
    """What is known of a made-up recurrence; moving a carry takes ``cost`` runs of a segment each way."""
    held = replace(needs(segment, carry, tape, scratch), staged=2)

    def moving(problem: Problem) -> Problem:
        return replace(problem, write=cost, read=cost)

    return demand_of(steps, held, PASSES, moving=moving)


def chosen(demand: Demand, budget: int, schedule: str) -> Choice:
    remote = None if schedule in ("revolve", "standard") else "disk"
    options = Options(schedule=schedule, remote=remote, memory_budget=budget)
    return choose(demand, options).choice


def least(demand: Demand, schedule: str) -> int:
    with pytest.raises(BudgetError) as refused:
        chosen(demand, 1, schedule)
    return refused.value.nbytes


@given(**SIZES)
@settings(max_examples=25, deadline=None)
def test_no_schedule_by_name_needs_less_than_auto(
    steps: int, segment: int, carry: int, tape: int, scratch: int, cost: float
) -> None:
    demand = moved_demand(steps, segment, carry, tape, scratch, cost)
    lowest = least(demand, "auto")
    names = ("remote", "double", "hrevolve", "revolve", "standard")
    assert lowest <= min(least(demand, name) for name in names)
    assert peak_of(demand, chosen(demand, lowest, "auto")) == lowest


@given(**SIZES, share=st.floats(1.0, 6.0))
@example(steps=7, segment=1, carry=2, tape=1, scratch=0, cost=1.0, share=1.0)  # blocks of one segment run longer
@settings(max_examples=25, deadline=None)
def test_no_optimum_by_name_is_faster_than_auto_by_a_tenth(
    steps: int, segment: int, carry: int, tape: int, scratch: int, cost: float, share: float
) -> None:
    demand = moved_demand(steps, segment, carry, tape, scratch, cost)
    budget = int(share * least(demand, "auto"))
    found = chosen(demand, budget, "auto")
    assert peak_of(demand, found) <= budget
    for name in ("hrevolve", "revolve", "remote"):
        try:
            other = chosen(demand, budget, name)
        except BudgetError:
            continue
        moved = replace(other, problem=demand.moving(other.problem))
        assert steps_run(found) <= 1.11 * steps_run(moved)


@given(**SIZES, budget=st.integers(1, 9_000), schedule=st.sampled_from(["auto", "double", "remote", "hierarchical"]))
@settings(max_examples=30, deadline=None)
def test_choices_that_are_left_out_could_not_have_been_taken(
    steps: int, segment: int, carry: int, tape: int, scratch: int, cost: float, budget: int, schedule: str
) -> None:
    demand = moved_demand(steps, segment, carry, tape, scratch, cost)
    found = list[Any]()
    for bound in (Demand.bound, lambda *_: 0):  # which leaves out none
        try:
            with mock.patch.object(Demand, "bound", bound):
                found.append(chosen(demand, budget, schedule))
        except BudgetError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("ahead", [True, False])
def test_what_waits_to_be_written_is_gone_when_the_backward_begins(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def slow(*args: Any) -> int:
        time.sleep(0.01)
        return write(*args)

    @register_schedule("away", ("remote",))
    def away(problem: Problem) -> Interval:
        """All but the last steps, which are taped at once, from carries on disk."""
        last = (problem.segments - 1) * problem.segment
        starts = [*range(0, last, problem.segment), last]
        kept = [Interval(stop - start, problem.tier) for start, stop in pairwise(starts)]
        return Interval(problem.steps, children=(*kept, Interval(problem.steps - last, taped=True)))

    model, x = RecurrentLIF(6, 64, 3), spikes(40, 64, 6)
    plain = gradients(model, x, model)
    options: dict[str, Any] = {"schedule": "away", "segment": 2, "codec": "none", "spill_folder": tmp_path}
    fast = reroll.compile(model, lowering="eager", **options)
    gradients(fast, x, model)
    if not ahead:
        options["memory_budget"] = reroll.explain(fast, x).predicted_peak - 1
        fast = reroll.compile(model, lowering="eager", **options)
        gradients(fast, x, model)
    assert reroll.explain(fast, x).loops[0].tally.carries_written > 10
    assert reroll.explain(fast, x).loops[0].prefetched == ahead
    waiting, run_backward = list[int](), Executable.run_backward

    def noted(self: Executable, *args: Any) -> Any:
        waiting.append(sum(len(cast(DiskTier, tier)._staged) for tier in self.tiers.values()))
        return run_backward(self, *args)

    monkeypatch.setattr(Executable, "run_backward", noted)
    monkeypatch.setattr(os, "pwrite", slow)
    measured = reroll.measure(lambda: fast(x).square().mean().backward(), exclude=[model])
    report = reroll.explain(fast, x)
    assert len(waiting) > 10
    assert not any(waiting)
    assert measured.local_peak <= report.predicted_peak + 4 * report.outputs
    for got, expected in zip(gradients(fast, x, model), plain, strict=True):
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-6


def test_a_report_weighs_plans_that_move_carries_where_a_tier_is_named(tmp_path: Path) -> None:
    model, x = RecurrentLIF(6, 64, 3), spikes(60, 16, 6)
    tight: dict[str, Any] = {"memory_budget": 0.4, "lowering": "eager", "segment": 2}
    for options, moving in ((tight, False), ({**tight, "remote": "disk", "spill_folder": tmp_path}, True)):
        fast = reroll.compile(model, **options)
        fast(x).sum().backward()
        (loop,) = reroll.explain(fast, x).loops
        names = {each.name.split()[0] for each in loop.alternatives if each.tiers}
        assert names == ({"remote", "double", "hrevolve"} if moving else set())


@given(**{name: SIZES[name] for name in ("steps", "segment", "carry", "tape", "scratch")})
@settings(max_examples=60, deadline=None)
def test_without_a_budget_little_time_is_given_for_memory(
    steps: int, segment: int, carry: int, tape: int, scratch: int
) -> None:
    demand = demand_of(steps, needs(segment, carry, tape, scratch), PASSES)
    found = choose(demand, Options()).choice
    problem = replace(found.problem, memory=None)
    fastest = Choice("store_all", problem)
    assert steps_run(found) <= 1.05 * steps_run(fastest)
    assert peak_of(demand, found) <= peak_of(demand, fastest)
    for memory in range(carry + problem.tape, problem.segments * problem.tape, max(problem.tape // 2, 1)):
        other = Choice("revolve", replace(problem, memory=memory))
        if memory >= least_memory(problem) and steps_run(other) <= 1.05 * steps_run(fastest):
            assert peak_of(demand, found) <= peak_of(demand, other) + problem.segments * problem.tape // 100


def test_what_is_kept_of_spikes_alone_is_kept_of_all_steps() -> None:
    demand = replace(demand_of(1_000, needs(4, 10, 40, 5), PASSES), replay=True)
    assert choose(demand, Options()).choice.schedule == "store_all"
    assert choose(replace(demand, replay=False), Options()).choice.schedule == "revolve"
    assert choose(demand, Options(chunk=40)).choice.schedule == "standard"
