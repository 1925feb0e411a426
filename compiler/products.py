"""Products with weights, row by row: the work of a step that can be done for several steps at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx

from reroll.editing import aten, constants, shape

_ROWS: dict[Any, int] = {
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.convolution.default: 0,
    aten.embedding.default: 1,
}
"""Which operand of a product has rows along its first dimension, as the result has."""


def place_of_rows(product: fx.Node) -> int:
    """The position of the operand that has the rows."""
    return _ROWS[product.target]


def rows(product: fx.Node) -> fx.Node:
    """The operand whose rows give the rows of the result."""
    found = product.args[place_of_rows(product)]
    assert isinstance(found, fx.Node)
    return found


def products(graph: fx.Graph) -> list[list[fx.Node]]:
    """Groups of products that differ in nothing but their rows; their other operands are the same at all steps."""
    fixed = constants(graph)
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in _ROWS and _is_by_rows(node):
            rest = [arg for at, arg in enumerate(node.args) if at != place_of_rows(node)]
            if all(arg in fixed for arg in rest if isinstance(arg, fx.Node)):
                value, own = node.meta["val"], rows(node).meta["val"]
                found[node.target, repr(rest), repr(node.kwargs), value.dtype, own.dtype, own.shape[1:]].append(node)
    return list(found.values())


def _is_by_rows(node: fx.Node) -> bool:
    """Whether each row of the result depends on the same row of the operand only."""
    own = shape(rows(node))
    if not own or shape(node) is None:
        return False
    if node.target is aten.addmm.default:
        bias = shape(node.args[0])
        return bias is not None and (len(bias) < 2 or bias[0] == 1)
    return True
