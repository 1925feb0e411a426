"""The loops of a capture, run step by step in Python: what a rewrite of loops is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll.recurrence import Capture, Recurrence, between


def run_loop(recurrence: Recurrence, operands: Sequence[Tensor], *, once: bool = False) -> tuple[Tensor, ...]:
    """What a recurrence gives: its last carries, and its stacked outputs. Autograd sees each operation.

    once: run the first step alone, and give its outputs for those of all steps: their shapes are the same.
    """
    carried, steps = len(recurrence.carries), recurrence.steps
    carries, made = [*operands[:carried]], []
    with recurrence.modes():
        for t in range(1 if once else steps):
            at = replace(recurrence, xs=tuple(between(x, t, t + 1) for x in recurrence.xs))
            results = recurrence.step(*carries, *at.read_first(operands))
            carries = [*results[:carried]]
            made.append(results[carried:])
    rows = [made[0 if once else t] for t in range(steps)]
    kept = (range(steps)[each.first :: each.every] for each in recurrence.kept_rows)
    stacked = [_stacked([rows[t][y] for t in of_y], rows[0][y]) for y, of_y in enumerate(kept)]
    return (*carries, *stacked)


def _stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_empty((0, *like.shape))


class LoopInterpreter(fx.Interpreter):
    """Runs the graph around the loops of a capture, and these as ``run_loop`` does.

    module: the one in whose graph they were found, which holds the graph's attributes, of which ``held_as`` gives what
    stands for each.
    """

    def __init__(
        self, module: nn.Module, found: Capture, *, once: bool = False, held_as: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(module, graph=found.outer)
        self.loops, self.once = {each.name: each for each in found.recurrences}, once
        self.held_as = held_as or (lambda value: value)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What the module holds."""
        return self.held_as(super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The results of a loop."""
        return run_loop(self.loops[target], args, once=self.once)
