"""Reports made by hand, without a model: a step, a program and its costs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from reroll.planning.alternative import Alternative
from reroll.planning.choice import Choice
from reroll.planning.plan import Plan
from reroll.program.context import Context
from reroll.program.memory import Needs, OuterMemory, SegmentBytes, predict
from reroll.program.program import store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes
from reroll.program.verifier import verify
from reroll.recurrence import Recurrence, Slices
from reroll.report.report import CarryLine, Loop, Report
from reroll.schedules.machine import Costs, Machine, MachineTier, SegmentSeconds
from reroll.schedules.problem import Problem

PASSES = "sparsity,save,recompute,offload,compress,prefetch"
NASTY = "a<b> & 'c' \"d\" </script><i>"
NEEDS = Needs({1: SegmentBytes(10, 17, 15, 25), 2: SegmentBytes(19, 33, 31, 41)}, Sizes(5, 10), 5, 4, 3, 2)
DISK = Machine("by hand", {"disk": MachineTier("disk", write=1e3, read=2e3, latency=5e-4)})
COSTS = Costs({1: SegmentSeconds(3e-3, 4e-3, 8e-3), 2: SegmentSeconds(5e-3, 7e-3, 15e-3)}, DISK)


def cell(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(h @ w + x)


def loop(schedule: str = "double", steps: int = 24, chunk: int = 6, slots: int = 2, **fields: Any) -> Loop:
    """A recurrence under a schedule, remote on the disk, in segments of one step."""
    step = fx.symbolic_trace(cell)
    next(iter(step.graph.nodes)).meta["example_value"] = torch.zeros(2, 3)
    where = f'File "/home/{NASTY}/net.py", line 7, in forward: h = cell(h, x[t])'
    examples = (torch.zeros(2, 3), torch.zeros(steps, 2, 3), torch.zeros(3, 3))
    recurrence = Recurrence("rolled", step, steps, ("h",), (Slices(1, 0, 0, 1),), (2,), (), examples, where=where)
    choice = Choice(schedule, Problem(steps, 1, 5, 10, chunk=chunk, slots=slots, tier="disk"))
    context = Context(choice.root)
    program = run(PASSES, store_all(steps, 1), context)
    tally = verify(program, sizes=NEEDS.sizes)
    made = Loop(
        recurrence=recurrence,
        plan=Plan(choice, context, program, tally, predict(tally, NEEDS)),
        carries=(CarryLine("h", (2, 3), "float32", 24, "raw", 24, NASTY),),
        saved=10,
        outputs=0,
        around=OuterMemory(148, 148, 148),
        gradients=36,
        needs=NEEDS,
        lowering="eager",
    )
    return replace(made, **fields)


def report(*loops: Loop, **fields: Any) -> Report:
    """A report on recurrences, or on one."""
    return replace(Report(loops or (loop(),), fx.Graph(), outputs=48, outside=100), **fields)


def full() -> Report:
    """A report with everything that can be known, and nasty names."""
    chosen = loop()
    timed = replace(chosen, costs=COSTS)
    seconds, peak = timed.trace().seconds, timed.prediction.peak
    plans = (
        Alternative("double (chunk 6)", peak, seconds, 48, {"disk": 20}, chosen=True),
        Alternative(NASTY, 30 * peak, seconds / 2, 0),
        Alternative("standard (chunk 6)", 4 * peak, 2 * seconds, 24),
    )
    named = replace(timed.recurrence, name=NASTY, carries=(NASTY,))
    line = replace(timed.carries[0], name=NASTY)
    timed = replace(
        timed, recurrence=named, carries=(line,), alternatives=plans, budget=peak + 7, why=f"Because {NASTY}."
    )
    timed = replace(timed, measured_peak=peak + 9, measured_seconds=1.1 * seconds)
    return report(timed, notes=(NASTY,), proved=NASTY, measured_peak=200 + peak, measured_seconds=1.2 * seconds)
