"""Products with weights, row by row: the work of a step that can be done for several steps at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx

from reroll.graph.editing import aten, constants, shape

_TO_INPUTS = aten.convolution_backward.default  # here only where it gives nothing but the gradient of the inputs
_ROWS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0,),
    aten.addmm.default: (1,),
    aten.convolution.default: (0,),
    aten.embedding.default: (1,),
    _TO_INPUTS: (0, 1),
}
"""Which operands of a product have rows along their first dimension, as the result has."""


def places_of_rows(product: fx.Node) -> tuple[int, ...]:
    """The positions of the operands that have the rows."""
    return _ROWS[product.target]


def rows(product: fx.Node) -> fx.Node:
    """The operand whose rows give the rows of the result."""
    found = product.args[places_of_rows(product)[0]]
    assert isinstance(found, fx.Node)
    return found


def results(product: fx.Node) -> list[fx.Node]:
    """The nodes that have the rows of the result: the product itself, or the items that are read of it."""
    return list(product.users) if product.target is _TO_INPUTS else [product]


def products(graph: fx.Graph) -> list[list[fx.Node]]:
    """Groups of products that differ in nothing but their rows; their other operands are the same at all steps."""
    fixed = constants(graph)
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in _ROWS and _is_by_rows(node):
            places = places_of_rows(node)
            rest = [arg for at, arg in enumerate(node.args) if at not in places]
            if all(arg in fixed for arg in rest if isinstance(arg, fx.Node)):
                moving: Any = [node.args[place] for place in places]
                values = [each.meta["val"] for each in (results(node)[0], *moving)]
                kinds = [(value.dtype, value.shape[1:]) for value in values]
                found[node.target, repr(rest), repr(node.kwargs), repr(kinds)].append(node)
    return list(found.values())


def _is_by_rows(node: fx.Node) -> bool:
    """Whether each row of the result depends on the same rows of the operands only."""
    if node.target is _TO_INPUTS:
        return node.args[-1] == [True, False, False] and None not in map(shape, node.all_input_nodes)
    if not shape(rows(node)) or shape(node) is None:
        return False
    if node.target is aten.addmm.default:
        bias = shape(node.args[0])
        return bias is not None and (len(bias) < 2 or bias[0] == 1)
    return True
