"""Programs and bytes of made-up problems, for tests of planners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reroll.planning.choice import Choice
from reroll.planning.plan import Demand
from reroll.program.context import Context
from reroll.program.memory import Needs, SegmentBytes, predict
from reroll.program.program import Program, store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes
from reroll.program.verifier import verify
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from toy import DECIDE


def program_of(schedule: str, problem: Problem) -> Program:
    start = store_all(problem.steps, problem.segment)
    return run(DECIDE, start, Context(tree(schedule, problem)))


def needs(segment: int, carry: int, tape: int, scratch: int) -> Needs:
    held = SegmentBytes(tape, tape + scratch, tape + scratch, tape + 2 * scratch)
    return Needs(
        {segment: held, 1: held}, Sizes(carry, taped=lambda low, high: -(-(high - low) // segment) * tape), carry, carry
    )


def demand_of(steps: int, known: Needs, passes: str = DECIDE, **others: Any) -> Demand:
    """What a planner is told of a made-up recurrence whose segments need so much."""
    root = tree("store_all", Problem(steps, max(known.segments)))
    return Demand(Context(root), known, tuple(passes.split(",")), **others)


def peak_of(demand: Demand, choice: Choice) -> int:
    """The predicted peak of a choice, whose program is checked once more."""
    under = replace(demand.context, root=choice.root, ahead=choice.ahead)
    program = run(demand.passes, store_all(choice.steps, choice.segment), under)
    return predict(verify(program, sizes=demand.needs.sizes), demand.needs).peak


def gradients(run: Any, x_TBI: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(run(x_TBI).square().mean(), list(model.parameters())))
