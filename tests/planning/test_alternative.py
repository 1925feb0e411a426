"""What other plans would take: each plan's time is that of its program, wherever a report says it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planned import demand_of, needs
from reroll.passes import DEFAULT_PASSES
from reroll.planning.alternative import alternatives, pareto
from reroll.planning.choice import Choice, preferred
from reroll.planning.options import Options
from reroll.program.memory import SegmentBytes
from reroll.program.timeline import trace
from reroll.schedules.machine import Costs, Machine, SegmentSeconds
from reroll.schedules.problem import Problem

COSTS = Costs({4: SegmentSeconds(1.0, 1.0, 2.0, thin_backward=2.5)}, Machine("given"))


@pytest.mark.parametrize("thin", [0, 8, 24])
def test_thin_tapes_are_priced_as_their_program_is(thin: int) -> None:
    held, small = needs(4, 10, 100, 0), SegmentBytes(40, 0, 0, 0)
    sizes = replace(held.sizes, first=0, thin=lambda low, high: 10 * (high - low))
    demand = demand_of(24, replace(held, sizes=sizes, thin={4: small}), ",".join(DEFAULT_PASSES))
    plan = demand.plan(Choice("store_all", Problem(24, 4, 10, 100), thin=thin))
    found = alternatives(plan, demand, Options(), COSTS)
    chosen = next(each for each in found if each.chosen)
    assert chosen.seconds == trace(plan.program, demand.needs, COSTS).seconds == 6 * 3 + thin / 4 * 0.5
    assert all(each.seconds == 18 for each in found if each.name == "store_all (segment 4)")
    assert chosen in pareto(found)  # thin tapes hold less, and take longer


@pytest.mark.parametrize(("asked", "played"), [(10, 12), (12, 12), (1, 4), (39, 39), (23, 24)])
def test_a_chunk_is_whole_segments_and_is_called_so(asked: int, played: int) -> None:
    choice = preferred(Problem(39, 4, 10, 100), Options(schedule="standard", chunk=asked), replay=False)
    assert choice.problem.chunk == played
    assert max(child.steps for child in choice.root.children) == played
    assert choice.describe() == f"standard (segment 4, chunk {played})"
