"""Counting a tree gives what the verifier counts of the program that plays it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.errors import OptionError
from reroll.program.context import Context
from reroll.program.program import store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes
from reroll.program.verifier import verify
from reroll.schedules.counts import counted
from reroll.schedules.interval import Interval
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from streams import Seconds, makespan
from toy import DECIDE

SCHEDULES = ("store_all", "standard", "every_k", "full", "remote", "double", "double_merged", "revolve", "hrevolve")


def compare(root: Interval, problem: Problem) -> int:
    """Compare all counts; gives the local peak."""
    found = counted(root, problem)
    made = run(DECIDE, store_all(problem.steps, problem.segment), Context(root))
    sizes = Sizes(problem.carry, problem.tape // problem.segment)
    tally = verify(made, sizes=sizes)
    assert (found.local_peak, found.remote_peak) == (tally.local_peak, tally.remote_peak)
    assert (found.rerun, found.writes, found.reads) == (tally.reforward_steps, tally.remote_writes, tally.remote_reads)
    seconds = 10 * problem.segments + 2 * found.runs + found.writes * 7 + found.reads * 11
    assert makespan(made, Seconds(2, 3, 7, 1 / 6, 1 / 10, 1, 1), overlapped=False) == pytest.approx(seconds)
    ahead = verify(run(f"{DECIDE},prefetch", store_all(problem.steps, problem.segment), Context(root)), sizes=sizes)
    assert tally.local_peak <= ahead.local_peak <= found.local_peak + problem.carry
    return found.local_peak


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    steps, segment, carry, tape = (draw(st.integers(1, most)) for most in (40, 3, 9, 9))
    memory = draw(st.none() | st.integers(carry + tape * segment, (carry + tape) * (steps + segment)))
    slots = draw(st.none() | st.integers(1, 5))
    chunk, tier = draw(st.integers(1, steps)), draw(st.sampled_from(("disk", "local")))
    costs = [draw(st.sampled_from((0.0, 0.3, 2.0))) for _ in range(2)]
    room = draw(st.none() | st.integers(0, 4))
    return Problem(steps, segment, carry, tape * segment, memory, chunk, slots, tier, room, *costs)


@pytest.mark.variants(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(problem=problems())
@settings(max_examples=30, deadline=None)
def test_counts_are_those_of_the_verifier(schedule: str, problem: Problem) -> None:
    if "double" not in schedule:
        problem = replace(problem, tier="disk")
    try:
        root = tree(schedule, problem)
    except OptionError:  # too little for revolve
        return
    peak = compare(root, problem)
    if schedule in ("revolve", "hrevolve") and problem.memory is not None and problem.slots is None:
        assert peak <= problem.memory


@st.composite
def trees(draw: st.DrawFn, steps: int = 12, depth: int = 3, tiers: tuple[str, ...] = ("local", "disk")) -> Interval:
    """Trees of no schedule: any carry local or remote, but a carry in hand is not read again; any leaf taped."""
    tier = draw(st.sampled_from(tiers))
    if depth == 0 or steps == 1 or draw(st.integers(0, 3)) == 0:
        taped = depth < 3 and draw(st.booleans())
        return Interval(steps, "local" if taped else tier, taped=taped)
    cuts = sorted(draw(st.sets(st.integers(1, steps - 1), max_size=3)))
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, steps], strict=True)]
    first = ("local",) if depth < 3 and tier == "local" else ("local", "disk")
    allowed = (first, *(("local", "disk"),) * (len(lengths) - 1))
    children = tuple(draw(trees(length, depth - 1, each)) for length, each in zip(lengths, allowed, strict=True))
    return Interval(steps, "local" if depth == 3 else tier, children)


@given(root=trees(), carry=st.integers(1, 5), tape=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_trees_of_no_schedule_are_counted_too(root: Interval, carry: int, tape: int) -> None:
    compare(root, Problem(root.steps, 1, carry, tape))


def test_equal_intervals_are_counted_once() -> None:
    interval = Interval(1)
    for _ in range(40):
        interval = Interval(2 * interval.steps, children=(interval, interval))
    found = counted(interval, Problem(2**40, 1, 3, 5))
    assert found.local_peak == 41 * 3 + 5
    assert found.rerun == 40 * 2**40
