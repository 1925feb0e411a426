"""The loops of a capture, run step by step in Python: what a rewrite of loops is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from reroll.recurrence import Capture, Recurrence, between

Steps = tuple[list[Tensor], list[tuple[Tensor, ...]]]
"""The carries behind some steps, and the outputs of each of these."""


def run_loop(
    recurrence: Recurrence, operands: Sequence[Tensor], *, once: bool = False, span: int = 0
) -> tuple[Tensor, ...]:
    """What a recurrence gives: its last carries, and its stacked outputs. Autograd sees each operation.

    once: run the first step alone, and give its outputs for those of all steps: their shapes are the same.
    span: of so many steps autograd keeps the carries before them alone, and they are run again backwards; 0: all.
    """
    steps, last = recurrence.steps, 1 if once else recurrence.steps
    carries, stacks = [*operands[: len(recurrence.carries)]], list[list[Tensor]]()
    for start in range(0, last, span or last):
        run = partial(_run, recurrence, operands, range(start, min(start + (span or last), last)))
        carries, made = checkpoint(run, carries, use_reentrant=False) if span else run(carries)
        stacks = stacks or [[] for _ in made[0]]
        for t, results in enumerate(made * steps if once else made, start):
            for stack, kept, value in zip(stacks, recurrence.kept_rows, results, strict=True):
                stack += [value] if t in range(steps)[kept.first :: kept.every] else []
    rows = zip(stacks, made[0], strict=True)
    return (*carries, *(torch.stack(stack) if stack else like.new_empty((0, *like.shape)) for stack, like in rows))


def _run(recurrence: Recurrence, operands: Sequence[Tensor], steps: range, carries: list[Tensor]) -> Steps:
    carried, made = len(carries), list[tuple[Tensor, ...]]()
    with recurrence.modes():
        for t in steps:
            at = replace(recurrence, xs=tuple(between(x, t, t + 1) for x in recurrence.xs))
            results = recurrence.step(*carries, *at.read_first(operands))
            carries = [*results[:carried]]
            made.append(results[carried:])
    return carries, made


class LoopInterpreter(fx.Interpreter):
    """Runs the graph around the loops of a capture, and these as ``run_loop`` does.

    module: the one in whose graph they were found, which holds the graph's attributes, of which ``held_as`` gives what
    stands for each. checkpoints: whether autograd keeps about sqrt(T) carries and as many steps of a loop of T.
    """

    def __init__(
        self,
        module: nn.Module,
        found: Capture,
        *,
        once: bool = False,
        checkpoints: bool = False,
        held_as: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(module, graph=found.outer)
        self.loops, self.once, self.checkpoints = {each.name: each for each in found.recurrences}, once, checkpoints
        self.held_as = held_as or (lambda value: value)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What the module holds."""
        return self.held_as(super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The results of a loop."""
        loop = self.loops[target]
        return run_loop(loop, args, once=self.once, span=math.isqrt(loop.steps) if self.checkpoints else 0)
