"""What schedules offer is the best of all chunks and slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.errors import MachineError, OptionError
from reroll.formulas import formula
from reroll.planning import offers
from reroll.planning.offers import OFFERS, Priced, least, plan_rows, recommended
from reroll.planning.options import Options
from reroll.program.context import Context
from reroll.program.program import store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes
from reroll.program.verifier import verify
from reroll.schedules.machine import Costs, Machine, MachineTier, SegmentSeconds
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from streams import Seconds, makespan
from toy import DECIDE

DISK = MachineTier("disk", 2.0, 1.0, 5.0)
EACH = SegmentSeconds(1.0, 1.0, 2.0)


def costs(each: SegmentSeconds = EACH, tier: MachineTier = DISK, overlapped: bool = False) -> Costs:
    """Of segments of up to three steps."""
    return Costs(dict.fromkeys((1, 2, 3), each), Machine("m", {"disk": tier}), overlapped)


PROBLEM = Priced(60, 1, 3, 5, tier="disk", costs=costs())
SEARCHED = ("revolve", "hrevolve")


@st.composite
def problems(draw: st.DrawFn) -> Priced:
    steps = draw(st.integers(1, 40))
    segment = draw(st.integers(1, min(steps, 3)))
    carry, tape, forward, taping, backward = (draw(st.integers(1, 9)) for _ in range(5))
    write, read = (draw(st.sampled_from((0.5, 1.0, 5.0))) for _ in range(2))
    tier = MachineTier("disk", write, read, draw(st.sampled_from((0.0, 1.0, 20.0))))
    return Priced(
        steps=steps,
        carry=carry,
        tape=tape * segment,
        costs=costs(SegmentSeconds(forward, taping, backward), tier, draw(st.booleans())),
        segment=segment,
        memory=draw(st.none() | st.integers(1, (carry + tape) * steps)),
        tier="disk",
    )


@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_no_chunk_and_slots_are_better(problem: Priced) -> None:
    chunk, slots = (each.ravel() for each in np.mgrid[1 : problem.steps + 1, 1 : problem.steps + 1])
    for name in OFFERS.keys() - SEARCHED:
        rows = list(OFFERS[name](problem))
        scheme, tier = rows[0].schedule, "local" if name == "double, local" else "disk"
        every = formula(scheme, tier).evaluate(chunk=chunk, slots=np.minimum(slots, chunk), **problem.numbers)
        peaks = every.prefetched_peak if problem.costs.overlapped else every.local_peak
        seconds = every.overlapped if problem.costs.overlapped else every.blocking
        assert least(problem, rows).local_peak == peaks.min()
        fitting = seconds[peaks <= (problem.memory or np.inf)]
        found = [row.seconds for row in rows if row.fits]
        assert bool(found) == bool(fitting.size)
        if found:
            assert problem.ticks(min(found)) <= problem.ticks(fitting.min())


@pytest.mark.parametrize("steps", [301, 397, 512, 640])
def test_of_many_steps_not_all_chunks_are_tried_and_none_is_missed(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for carry, tape in ((1, 1), (7, 2), (2, 7)):
        problem = replace(PROBLEM, steps=steps, carry=carry, tape=tape)
        few = [least(problem, list(OFFERS[name](problem))).local_peak for name in ("double, local", "double")]
        with monkeypatch.context() as patched:
            patched.setattr(offers, "_FEW", 10**4)
            every = [least(problem, list(OFFERS[name](problem))).local_peak for name in ("double, local", "double")]
        assert few == every


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("budget", [None, 40, 60, 120])
def test_rows_are_what_the_verifier_counts(budget: int | None, overlapped: bool) -> None:
    problem = replace(PROBLEM, memory=budget, costs=costs(overlapped=overlapped))
    for row in plan_rows(problem):
        if row.schedule in SEARCHED:
            continue
        root = tree(row.schedule, Problem(60, 1, chunk=row.chunk or 1, slots=row.slots or 1, tier=row.tier))
        passes = f"{DECIDE},prefetch" if overlapped else DECIDE
        tally = verify(run(passes, store_all(60, 1), Context(root)), sizes=Sizes(3, 5))
        assert (row.local_peak, row.remote_peak, row.rerun) == (
            tally.local_peak,
            tally.remote_peak,
            tally.reforward_steps,
        )
        assert (row.writes, row.reads, row.carries) == (tally.remote_writes, tally.remote_reads, tally.carries_written)
        assert Options(**row.options(1))  # type: ignore[arg-type]  # names with their own types


@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_optimal_schedules_are_what_the_verifier_counts(problem: Priced) -> None:
    """With transfers beside the segments a row says no less than the verifier, by one carry at most."""
    for row in (row for name in SEARCHED for row in OFFERS[name](problem)):
        moved = problem.moving(problem.costs.machine.tier("disk"), problem.costs.of(problem.segment).forward)
        ahead = problem.carry if row.tier == "disk" and problem.costs.overlapped else 0
        root = tree(row.schedule, replace(moved, memory=None if row.memory is None else row.memory - ahead))
        passes = f"{DECIDE},prefetch" if problem.costs.overlapped else DECIDE
        made = run(passes, store_all(problem.steps, problem.segment), Context(root))
        tally = verify(made, sizes=Sizes(problem.carry, problem.tape // problem.segment))
        assert 0 <= row.local_peak - tally.local_peak <= ahead
        assert (row.remote_peak, row.rerun) == (tally.remote_peak, tally.reforward_steps)
        assert (row.writes, row.reads) == (tally.remote_writes, tally.remote_reads)
        assert row.fits == (problem.memory is None or row.local_peak <= problem.memory)
        assert row.memory is None or row.local_peak <= row.memory
        tier, each = problem.costs.machine.tier("disk"), problem.costs.of(problem.segment)
        numbers = (each.forward, each.tape, each.backward, tier.write, tier.read, tier.latency, problem.carry)
        seconds = makespan(made, Seconds(*numbers), overlapped=problem.costs.overlapped)
        if problem.costs.overlapped:
            assert row.seconds <= seconds * (1 + 1e-9)
        else:
            assert row.seconds == pytest.approx(seconds)
        assert Options(**row.options(problem.segment))  # type: ignore[arg-type]  # names with their own types


def test_optimal_schedules_make_the_best_of_a_budget() -> None:
    problem = replace(PROBLEM, memory=60, costs=costs(tier=MachineTier("disk", 1e9, 1e9)))
    rows = {row.schedule: row for row in plan_rows(problem) if row.fits}
    assert rows["hrevolve"].seconds <= rows["revolve"].seconds
    assert rows["revolve"].rerun <= min(row.rerun for row in rows.values() if row.tier == "local")
    assert rows["revolve"].options(1) == {"schedule": "revolve", "segment": 1, "memory_budget": 60}
    assert rows["hrevolve"].options(1)["remote"] == "disk"
    (small,) = (row for row in plan_rows(replace(problem, memory=7)) if row.schedule == "revolve")
    assert not small.fits
    assert small.memory == small.local_peak > 7
    (fixed,) = (row for row in plan_rows(replace(problem, slots=3)) if row.schedule == "revolve")
    assert (fixed.slots, fixed.local_peak, fixed.memory) == (3, 3 * 3 + 5, None)
    assert "revolve" not in {row.schedule for row in plan_rows(replace(problem, slots=1))}  # some run 59 times


def test_a_larger_budget_is_never_slower() -> None:
    ticks: list[float] = []
    for budget in range(10, 310, 7):
        problem = replace(PROBLEM, memory=budget)
        best = recommended(problem, plan_rows(problem))
        assert best is None or best.local_peak <= budget
        ticks.append(np.inf if best is None else float(problem.ticks(best.seconds)))
    assert ticks == sorted(ticks, reverse=True)
    assert ticks[-1] == 1000 < ticks[0]


def test_of_equally_fast_rows_fewer_transfers_win() -> None:
    problem = replace(PROBLEM, steps=1000, memory=60, costs=costs(tier=MachineTier("disk", 1e9, 1e9), overlapped=True))
    (row,) = (row for row in plan_rows(problem) if row.schedule == "remote")
    assert row.chunk == 10  # the longest that fits: shorter ones hide their reads as well


def test_a_tier_that_is_too_small() -> None:
    problem = replace(PROBLEM, memory=20, costs=costs(tier=replace(DISK, capacity=3)))
    rows = plan_rows(problem)
    assert {row.schedule for row in rows if row.fits} == {"revolve", "hrevolve"}
    assert all(row.remote_peak <= 3 for row in rows if row.fits)
    without = [row for row in rows if row.schedule not in SEARCHED]
    assert recommended(problem, without) is None
    assert least(problem, without).tier == "local"
    wide = replace(problem, costs=costs(tier=replace(DISK, capacity=3 * 60)))
    best = recommended(wide, [row for row in plan_rows(wide) if row.schedule not in SEARCHED])
    assert best is not None
    assert best.tier == "disk"


def test_without_a_tier_nothing_is_kept_elsewhere() -> None:
    problem = replace(PROBLEM, tier="local")
    assert [(row.schedule, row.tier) for row in plan_rows(problem)] == [
        ("store_all", "local"),
        ("standard", "local"),
        ("double", "local"),
        ("revolve", "local"),
    ]


def test_numbers_that_are_fixed() -> None:
    rows = {(row.schedule, row.tier): row for row in plan_rows(replace(PROBLEM, chunk=12, slots=3))}
    assert {row.chunk for row in rows.values()} == {None, 12}
    assert rows["double", "disk"].slots == rows["hierarchical", "disk"].slots == 3
    assert rows["standard", "local"].slots is None


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"steps": None},
        "steps=None, but a plan needs their number. Give steps; while it is not known, reroll.schedules.Online",
    ),
    ({"steps": 0}, "steps=0, but it must be a whole number, 1 or more"),
    ({"memory": -1}, "memory=-1"),
    ({"carry": 0.5}, "carry=0.5"),
    ({"tape": None}, "tape=None"),
    ({"chunk": 61}, "chunk=61 of steps=60: give 60 at most"),
    ({"slots": 9, "chunk": 8}, "slots=9 of chunk=8"),
    ({"slots": 61}, "slots=61 of steps=60"),
    ({"segment": 61}, "segment=61 of steps=60"),
)


@pytest.mark.parametrize(("numbers", "sentence"), WRONG)
def test_problems_that_make_no_sense(numbers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        replace(PROBLEM, **numbers)


def test_costs_that_do_not_know_enough() -> None:
    with pytest.raises(MachineError, match="segment of 4 steps are not known"):
        replace(PROBLEM, segment=4)
    with pytest.raises(MachineError, match="Nothing is known of the tier 'host'"):
        replace(PROBLEM, tier="host")
