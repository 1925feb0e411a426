"""Programs and bytes of made-up problems, for tests of planners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reroll.program.context import Context
from reroll.program.memory import Needs, SegmentBytes
from reroll.program.program import Program, store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes
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


def gradients(run: Any, x_TBI: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(run(x_TBI).square().mean(), list(model.parameters())))
