"""Which segments are compiled under a budget: shorter ones where they run less, or where nothing else fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planned import demand_of, needs
from reroll.backends.construct import share as fitting
from reroll.backends.construct.plan import Built
from reroll.errors import BudgetError
from reroll.planning.choice import Choice, steps_run
from reroll.planning.choose import Beside, choose
from reroll.planning.options import Options
from reroll.planning.plan import Demand, Plan
from reroll.recurrence import Recurrence


class Cautious(Demand):
    """A demand that predicts all scratch beside the most that is held of carries and tapes."""

    def plan(self, choice: Choice) -> Plan:
        made = super().plan(choice)
        peak = replace(made.prediction.backward, nbytes=self.needs.scratch + made.tally.local_peak)
        return replace(made, prediction=replace(made.prediction, backward=peak))


class Loop:
    """A recurrence whose segments are numbers: ``tape`` and ``scratch`` units for each of their steps."""

    def __init__(self, steps: int, carry: int, tape: int, scratch: int) -> None:
        self.steps, self.carry, self.tape, self.scratch = steps, carry, tape, scratch
        self.compiled: list[int] = []

    def plan(self, length: Any, _: Any, options: Options, beside: Beside) -> Built:
        """What ``build.plan`` does for segments of this length."""
        self.compiled.append(length)
        known = demand_of(self.steps, needs(length, self.carry, self.tape * length, self.scratch * length))
        demand = Cautious(known.context, known.needs, known.passes)
        return cast(Built, SimpleNamespace(choice=choose(demand, options, beside).choice, demand=demand))

    def fitted(self, budget: int, lengths: list[int]) -> Choice:
        """The choice within a budget."""
        self.compiled = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fitting, "plan", self.plan)
            patch.setattr(fitting, "segment_lengths", lambda recurrence, options: lengths)
            kernels: Any = lambda length: length  # noqa: E731
            options = Options(memory_budget=budget)
            return fitting._fitting(kernels, cast(Recurrence, None), options, Beside()).choice


SIZES = {
    "steps": st.integers(8, 200),
    "carry": st.integers(1, 40),
    "tape": st.integers(1, 60),
    "scratch": st.integers(0, 30),
    "budgets": st.lists(st.integers(100, 12_000), min_size=2, max_size=5),
}
LENGTHS = [8, 4, 2, 1]


@given(**SIZES)
@settings(max_examples=40, deadline=None)
def test_more_bytes_are_never_slower_by_a_tenth(
    steps: int, carry: int, tape: int, scratch: int, budgets: list[int]
) -> None:
    """Whatever lengths are compiled: each is examined unless it cannot run a tenth less."""
    loop, work = Loop(-(-steps // 8) * 8, carry, tape, scratch), list[float]()
    for budget in sorted(budgets):
        try:
            choice = loop.fitted(budget, LENGTHS)
        except BudgetError:
            assert not work, "a larger budget was refused"
            continue
        best = min(steps_run(each) for length in LENGTHS for each in alone(loop, budget, length))
        assert best <= steps_run(choice) <= best / 0.9
        work.append(steps_run(choice))
    assert all(later <= earlier / 0.9 for at, earlier in enumerate(work) for later in work[at:])


def alone(loop: Loop, budget: int, length: int) -> list[Choice]:
    try:
        return [loop.fitted(budget, [length])]
    except BudgetError:
        return []


def test_shorter_segments_are_compiled_only_where_they_may_run_less() -> None:
    loop = Loop(steps=160, carry=4, tape=20, scratch=2)
    assert loop.fitted(10_000, LENGTHS).schedule == "store_all"
    assert loop.compiled == [8]
    assert loop.fitted(2_000, LENGTHS).segment == 8, "half of the steps are taped, so little can be gained"
    assert loop.compiled == [8]
    tight = Loop(steps=480, carry=100, tape=20, scratch=2)
    assert tight.fitted(640, LENGTHS).segment == 2
    assert tight.compiled == [8, 4, 2], "eight steps do not fit"
    assert steps_run(tight.fitted(640, LENGTHS)) < 0.95 * steps_run(tight.fitted(640, [4]))
