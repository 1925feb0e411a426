"""Numbers of a step that depend on the length become per-step inputs, so that the compiled step serves every length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from reroll.capture.lengths.template import ADVICE, Progression, RowRun, Varies
from reroll.capture.steps.colours import may_move
from reroll.capture.steps.extract import promoted
from reroll.errors import LengthError
from reroll.graph.editing import flatten, rebuild
from reroll.graph.effects import example
from reroll.graph.lines import where
from reroll.graph.private import map_aggregate
from reroll.recurrence import Numbers, Recurrence

Merged = list[tuple[fx.Node, Any, Any]]


def lift(recurrence: Recurrence, merged: Merged) -> tuple[Recurrence, list[Numbers]]:
    """The recurrence with every number of its step that depends on the length as one more per-step input.

    merged: the step's nodes with their operands at all lengths. Raises LengthError for a number that is no operand of
    arithmetic.
    """
    numbers = list(_numbers(merged))
    if not numbers:
        return recurrence, []
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = [node for node, _, _ in merged if node.op == "placeholder"]
    inputs = recurrence.slots(1).constants.start
    for node in placeholders[:inputs]:
        env[node] = graph.node_copy(node)
    made = [graph.placeholder(f"x_length{at}") for at in range(len(numbers))]
    for node in (*placeholders[inputs:], *(node for node, _, _ in merged if node.op != "placeholder")):
        env[node] = graph.node_copy(node, env.__getitem__)
        for (reader, place, value), number in zip(numbers, made, strict=True):
            if reader is node:
                _put(graph, env[node], place, number, Numbers(value.values).dtype)
    step = fx.GraphModule(recurrence.step, graph)
    return replace(recurrence, step=step), [Numbers(value.values) for _, _, value in numbers]


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


def _put(graph: fx.Graph, node: fx.Node, place: int, number: fx.Node, dtype: torch.dtype) -> None:
    """Put a per-step number in the place of a Python number."""
    leaves = flatten(node)
    like = next(value for leaf in leaves if (value := example(leaf)) is not None)
    with graph.inserting_before(node):
        leaves[place] = promoted(graph, number, dtype, like, leaves[place])
    node.args, node.kwargs = rebuild(node, leaves)
