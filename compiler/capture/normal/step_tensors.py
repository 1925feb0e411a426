"""Tensors that are made of a number of the step are written as fillings, whose number may be another one at each step.

``torch.tensor([t])``, ``as_tensor`` and ``new_tensor`` become ``torch.full``, ``torch.arange(t, t + n)`` a range from
zero and a number: only where several alike are made of different numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from reroll.capture.fills import filled
from reroll.graph.effects import example, spelled
from reroll.graph.lines import take_line

_GIVEN = {"tensor": 0, "as_tensor": 0, "new_tensor": 1, "scalar_tensor": 0}  # where the numbers stand
_ALIKE = 3
_MOST = 16  # numbers of one tensor


def show_numbers(graph: fx.Graph) -> None:
    """Write out the numbers of such tensors, in place."""
    groups = defaultdict[Any, dict[fx.Node, list[Any]]](dict)
    for node in graph.nodes:
        value, numbers = example(node), _numbers(node)
        if value is not None and numbers and not value.requires_grad:
            groups[node.target, value.shape, value.dtype, value.device][node] = numbers
    for alike in groups.values():
        if len({tuple(numbers) for numbers in alike.values()}) >= _ALIKE:
            for node, numbers in alike.items():
                made = _made(node, numbers)
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _numbers(node: fx.Node) -> list[Any]:
    """The numbers that a tensor is made of; none where it is made of anything else."""
    if node.op not in ("call_function", "call_method"):
        return []
    value, name = example(node), spelled(node)
    if node.target is torch.arange:
        plain = len(node.args) == 2 and all(type(each) is int for each in node.args)
        return [node.args[0]] if plain and value is not None and value.numel() else []
    at = _GIVEN.get(name)
    if at is None or len(node.args) <= at:
        return []
    found = list(_flat(node.args[at]))
    return found if len(found) <= _MOST and all(type(each) in (int, float) for each in found) else []


def _flat(given: Any) -> Iterator[Any]:
    if not isinstance(given, list | tuple):
        yield given
        return
    for each in given:
        yield from _flat(each)


def _made(node: fx.Node, numbers: list[Any]) -> fx.Node:
    """The tensor with its numbers as fillings, before a node."""
    graph, value = node.graph, example(node)
    assert value is not None
    if node.target is torch.arange and value.numel() > 1:
        with graph.inserting_before(node):
            zero = graph.call_function(torch.arange, (value.numel(),), {"dtype": value.dtype, "device": value.device})
            zero.meta["example_value"] = value.detach()
            take_line(zero, node)
            return graph.call_function(torch.add, (zero, numbers[0]))
    if len(numbers) == 1:
        return filled(node, value, numbers[0])
    entry = value.detach().reshape(-1)[0]
    entries = [filled(node, entry, number) for number in numbers]
    for each in entries:
        each.meta["example_value"] = entry
        take_line(each, node)
    with graph.inserting_before(node):
        flat = graph.call_function(torch.stack, (entries,))
        flat.meta["example_value"] = value.detach().reshape(-1)
        take_line(flat, node)
        return graph.call_function(torch.reshape, (flat, tuple(value.shape)))
