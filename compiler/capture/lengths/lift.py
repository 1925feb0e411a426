"""Numbers of a step that depend on the length become per-step inputs, so that the compiled step serves every length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from reroll.capture.lengths.template import ADVICE, Progression, RowRun, Varies
from reroll.capture.steps.numbers import Place, lifted, may_move
from reroll.errors import LengthError
from reroll.graph.lines import where
from reroll.graph.private import map_aggregate
from reroll.recurrence import Numbers, Recurrence

Merged = list[tuple[fx.Node, Any, Any]]


def lift(recurrence: Recurrence, merged: Merged) -> tuple[Recurrence, list[Numbers]]:
    """The recurrence with every number of its step that depends on the length as one more per-step input.

    merged: the step's nodes with their operands at all lengths. Raises LengthError for a number that is no operand of
    arithmetic.
    """
    found = list(_numbers(merged))
    if not found:
        return recurrence, []
    numbers = [Numbers(value.values) for _, _, value in found]
    places = [Place(node, place, value.values[-1]) for node, place, value in found]
    return replace(recurrence, step=lifted(recurrence, places, [each.dtype for each in numbers])), numbers


def _numbers(merged: Merged) -> Iterator[tuple[fx.Node, int, Varies]]:
    """(node, place among its operands, values) of every number that depends on the length."""
    for node, args, kwargs in merged:
        leaves: list[Any] = []
        map_aggregate((args, kwargs), leaves.append)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Progression | RowRun) or (isinstance(leaf, Varies) and not may_move(node, place)):
                raise LengthError(
                    f"What is used at {where(node)}, inside of the loop, depends on the number of steps and cannot "
                    f"become an input of the step. {ADVICE}"
                )
            if isinstance(leaf, Varies):
                yield node, place, leaf
