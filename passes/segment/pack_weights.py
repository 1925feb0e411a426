"""Products with weights that are laid out once per call as the product reads them, instead of at every product.

A general product copies its weight into panels first, each time; with few rows, as a step has, that is up to a third of
it. In a loop the weight is the same at every step, so the panels are made once (``once``). Method: packing, Goto and
van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from reroll.graph.editing import aten, call, constants, inserting_after, reads_memory, shape
from reroll.program.context import Context
from reroll.program.registry import register_pass
from reroll.segment.ops import PACK, PACKED_EVENTS, PACKED_PRODUCT, PRODUCT, ROWS

_LEAST_COLUMNS = 8
# The density up to which events in panels are no slower than dense panels (benchmarks/results/events.json).
CROSSOVER = 0.35


@register_pass("pack-weights", on="half")
def pack_weights(half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The graph with products of constant weights as products with packed ones, if it is for a CPU with vectors."""
    graph = half.graph
    if not context.vectors or reads_memory(graph):
        return half
    fixed, packed = constants(graph), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default, PRODUCT) and not node.kwargs:
            _, left, right = _operands(node)
            if right in fixed and left not in fixed and _has_kernel(node, left, right):
                _pack(graph, node, packed)
    graph.eliminate_dead_code()
    half.recompile()
    return half


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """What is added to a product, or None, and its factors."""
    operands: Any = (None, *node.args) if node.target is aten.mm.default else node.args[:3]
    bias, left, right = operands
    while isinstance(right, fx.Node) and right.target is ROWS:
        right = right.args[0]  # gathered from as it is packed
    return bias, left, right


def _has_kernel(node: fx.Node, left: Any, right: Any) -> bool:
    value = node.meta["val"]
    sizes = [shape(source) for source in (left, right, node)]
    if None in sizes or value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        return False
    return 0 not in (*value.shape, *left.meta["val"].shape) and value.shape[1] >= _LEAST_COLUMNS


def _pack(graph: fx.Graph, node: fx.Node, packed: dict[fx.Node, fx.Node]) -> None:
    """``node`` as a packed product. packed: the panels of weights so far."""
    bias, left, right = _operands(node)
    if right not in packed:
        with inserting_after(graph, [right]):
            packed[right] = call(graph, PACK, right)
    columns = node.meta["val"].shape[1]
    with graph.inserting_before(node):
        if node.target is PRODUCT:
            product = call(graph, PACKED_EVENTS, left, packed[right], None, columns, CROSSOVER, 0)
        else:
            product = call(graph, PACKED_PRODUCT, left, packed[right], columns, 0)
        if bias is not None:
            product = call(graph, aten.add.Tensor, product, bias)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
