"""Recurrences that differ in their operands only share their kernels: chunks of a long sequence, equal layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reroll.backends import build
from reroll.backends.build import Built, Kernels, fitting, lengths_of
from reroll.names import names_of
from reroll.options import Options
from reroll.recurrence import Recurrence
from reroll.sequence import module_content


def build_all(recurrences: Sequence[Recurrence], options: Options) -> list[Built]:
    """Compile recurrences as the options say, each kind of kernel once."""
    known: dict[Any, Kernels] = {}

    def kernels(recurrence: Recurrence, lengths: tuple[int, ...]) -> Kernels:
        key = (kind(recurrence), lengths)
        if key not in known:
            known[key] = build.compile_kernels(recurrence, options, lengths)
        return known[key]

    return [
        fitting(lambda length, each=each: kernels(each, lengths_of(each, length)), each, options)  # type: ignore[misc]
        for each in recurrences
    ]


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
