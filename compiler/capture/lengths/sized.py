"""Loops whose steps read values as large as the sequence is long: attention over all states of an encoder.

A step is compiled for one size, so such a loop has a step of its own at every length, with sizes of that length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from reroll.capture.lengths.template import Varies
from reroll.graph.fakes import apart_from_dynamo, fake_of, new_fake_mode
from reroll.graph.layouts import inverse, memory_order
from reroll.graph.private import map_aggregate
from reroll.recurrence import Recurrence, Slices

Shape = tuple[Any, ...]


def shapes_of(found: Sequence[Recurrence]) -> tuple[Shape, ...] | None:
    """The shapes of what the steps of one loop are given, if they are not the same at all lengths.

    Of a value of which each step reads a slice, and nothing else, the dimension of the slices does not count.
    """
    shapes = list[Shape]()
    for operand in range(found[-1].operands):
        dims = {x.dim for x in found[-1].xs if isinstance(x, Slices) and x.operand == operand}
        alone = len(dims) == 1 and operand not in found[-1].constants
        sizes = zip(*(each.examples[operand].shape for each in found), strict=True)
        shapes.append(tuple(_size(each, alone and at in dims) for at, each in enumerate(sizes)))
    return tuple(shapes) if any(isinstance(size, Varies) for shape in shapes for size in shape) else None


def _size(sizes: tuple[int, ...], of_time: bool) -> Any:
    return sizes[-1] if of_time or len(set(sizes)) == 1 else Varies(sizes)


def with_sizes(recurrence: Recurrence, graph: fx.Graph, shapes: Sequence[tuple[int, ...]]) -> Recurrence:
    """A recurrence with the step of a length, and with examples of its sizes."""
    examples = tuple(map(_resized, recurrence.examples, shapes))
    found = replace(recurrence, step=fx.GraphModule(recurrence.step, graph), examples=examples)
    mode = new_fake_mode()
    operands = [fake_of(mode, each) for each in examples]
    with apart_from_dynamo(mode), found.modes(), mode:
        _Sizing(found.step).run(*operands[: len(found.carries)], *found.read_first(operands, row=0))
    return found


def _resized(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An example of another size, whose dimensions lie in memory in the same order."""
    if tuple(value.shape) == shape:
        return value
    order = memory_order(value)
    made = value.new_empty([shape[dim] for dim in order]).permute(inverse(order))
    return made.requires_grad_(value.requires_grad)


class _Sizing(fx.Interpreter):
    """Runs a step on fakes, and keeps what its nodes give as their examples."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        found = super().run_node(n)
        if n.op not in ("output", "get_attr"):
            n.meta["example_value"] = map_aggregate(found, _apart)
        return found


def _apart(leaf: Any) -> Any:
    """A value without its history."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
