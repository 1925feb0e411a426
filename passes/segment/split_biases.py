"""Biases added where the result of a product is read: ``b + x W`` as a product and an addition, which costs nothing.

torch's product with a bias copies the bias to every row of the result first. As an addition it is fused with the
pointwise operations that read the product, so this is done only where nothing else reads it. Inductor puts sums of a
product and a bias together again (torch 2.11 and 2.13), but not differences: ``x W - (-b)``, of the same bits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from reroll.graph.editing import aten, call, shape
from reroll.graph.private import is_overload
from reroll.program.context import Context
from reroll.program.registry import register_pass

_PARTS = (operator.getitem, aten.unsafe_split.Tensor, aten.unsafe_chunk.default)


@register_pass("split-biases", on="half")
def split_biases(half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The graph with biases of products as pointwise operations, if it is compiled."""
    graph = half.graph
    if context.lowering != "inductor":
        return half
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, left, right = node.args
        if len(shape(bias) or ()) == 1 and not node.kwargs and _read_by_point(node):
            with graph.inserting_before(node):
                product = call(graph, aten.mm.default, left, right)
                negative = call(graph, aten.neg.default, bias)
                node.replace_all_uses_with(call(graph, aten.sub.Tensor, product, negative))
            graph.erase_node(node)
    half.recompile()
    return half


def _read_by_point(node: fx.Node) -> bool:
    """Whether only pointwise operations read a value, or views of it."""
    return all(_read_by_point(user) if _is_view(user) else _is_pointwise(user) for user in node.users)


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    return target in _PARTS or (is_overload(target) and target.is_view)


def _is_pointwise(node: fx.Node) -> bool:
    target: Any = node.target
    return is_overload(target) and torch.Tag.pointwise in target.tags
