"""Recurrences that differ in their operands only share their kernels: chunks of a long sequence, equal layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from reroll.backends.build import plan as build
from reroll.backends.build.plan import Built, Kernels, lengths_of
from reroll.backends.build.fitting import fitting_all
from reroll.graph.names import names_of
from reroll.options import Options
from reroll.planning.choose import Beside
from reroll.recurrence import Recurrence
from reroll.capture.steps.colours import module_content


def build_all(
    recurrences: Sequence[Recurrence], options: Options, beside: Callable[[Mapping[str, tuple[Tensor, ...]]], Beside]
) -> list[Built]:
    """Compile recurrences as the options say, each kind of kernel once.

    beside: from what they give, by their names, to what shares a budget with each of them.
    """
    known: dict[Any, Kernels] = {}

    def kernels(recurrence: Recurrence, lengths: tuple[int, ...]) -> Kernels:
        key = (kind(recurrence), lengths)
        if key not in known:
            known[key] = build.compile_kernels(recurrence, options, lengths)
        return known[key]

    kernels_of = [partial(_kernels_of_length, kernels, each) for each in recurrences]
    return fitting_all(kernels_of, recurrences, options, beside)


def _kernels_of_length(
    kernels: Callable[[Recurrence, tuple[int, ...]], Kernels], recurrence: Recurrence, length: int
) -> Kernels:
    return kernels(recurrence, lengths_of(recurrence, length))


def kind(recurrence: Recurrence) -> Any:
    """What the kernels of a recurrence depend on: its step, its inputs, the layout of its operands, its modes."""
    examples = (
        (tuple(each.shape), each.stride(), each.dtype, each.device, each.requires_grad) for each in recurrence.examples
    )
    return (
        module_content(recurrence.step),
        tuple(map(names_of, recurrence.step.graph.nodes)),
        len(recurrence.carries),
        recurrence.xs,
        recurrence.constants,
        len(recurrence.ys),
        tuple(examples),
        recurrence.autocast,
        recurrence.grad_enabled,
    )
