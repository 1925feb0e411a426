"""Event-driven products: ``z W`` with a z of spikes adds up the rows of W at the spikes, and so does ``z^T g``.

A product is given to the kernels of ``reroll.segment.ops`` where an operand is proved to hold zeros and one other
value, or -1, 0 and 1, or is made of such values by moves and scaling; or is an input of the model, which may be spikes.
The kernels look at what is really there at each call, and multiply densely where that is faster; so what is chosen here
is only worth a look. Method: gathers and scatters of event-driven simulators (Davies et al., Loihi, IEEE Micro 2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from reroll.graph.editing import aten, call, inserting_after, primals_and_tangents, reads_memory, shape
from reroll.operations import of
from reroll.program.context import Context
from reroll.program.registry import register_pass
from reroll.segment.ops import OUTER, PRODUCT, ROWS
from reroll.segment.products import turned
from reroll.segment.sparsity import Fact, infer

# Densities up to which events are no slower than dense products: read off benchmarks/results/events.json, with which a
# test compares them. ``z^T g`` reads all rows of g, of which few stay in the first cache.
CROSSOVER = 0.2
OUTER_CROSSOVERS = ((128, 0.28), (None, 0.2))  # (fewer rows than, density)
# Multiplications from which on a look at an operand that is dense after all costs little: 5 us on 50, or on 100.
SPIKES, INPUTS = 2**20, 2**22
_DTYPES = (torch.float32, torch.float64)


@register_pass("event-products", on="half")
def event_products(half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The graph with products of what may be mostly zeros as event products."""
    graph = half.graph
    if context.lowering != "inductor" or reads_memory(graph):
        return half
    least = _worth_a_look(graph, context)
    rows: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if _is_product(node)]:
        left, right = _operands(node)
        source = turned(left)
        if source is None and _is_large(node, least.get(left)):
            _gather(graph, node, rows if least[left] == SPIKES else None)
        elif source is not None and node.target is aten.mm.default:
            _scatter(graph, node, source, right, least)
    graph.eliminate_dead_code()
    half.recompile()
    return half


def too_small(half: fx.GraphModule, context: Context) -> list[tuple[int, int, int]]:
    """The sizes (rows, inner, columns) of products with spikes that are too small for event products to gain."""
    if context.lowering != "inductor" or reads_memory(half.graph):
        return []
    least, found = _worth_a_look(half.graph, context), dict[tuple[int, int, int], None]()
    for node in filter(_is_product, half.graph.nodes):
        left, right = _operands(node)
        if least.get(left) == SPIKES and not _is_large(node, SPIKES):
            found[(*left.meta["val"].shape, right.meta["val"].shape[1])] = None
    return list(found)


def _worth_a_look(graph: fx.Graph, context: Context) -> dict[fx.Node, int]:
    """Values that may be mostly zeros, and how large a product with them must be."""
    inputs = graph.find_nodes(op="placeholder")
    carried = {node: node.meta["carry"] for node in inputs if "carry" in node.meta}
    given = {node: context.facts[number] for node, number in carried.items() if number < len(context.facts)}
    facts = infer(graph, given)
    least: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources = [least[source] for source in node.all_input_nodes if source in least]
        if _has_few_values(facts[node]):
            least[node] = SPIKES
        elif node.meta.get("per_step"):
            least[node] = INPUTS
        elif sources and of(node.target).only_moves and len(sources) == len(node.all_input_nodes):
            least[node] = max(sources)
        elif sources and of(node.target).name in ("mul", "div"):
            least[node] = min(sources)
    return least


def _has_few_values(fact: Fact) -> bool:
    """Whether values are zero and one other constant, or -1, 0 and 1."""
    low, high = fact.bounds or (1, 1)
    return any(value == 0 for value in fact.values) or -1 <= low <= 0 <= high <= 1


def _is_product(node: fx.Node) -> bool:
    """Whether a node is a product of matrices, or one to which a vector is added, of a kind that has event kernels."""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    value = node.meta["val"]
    sizes = [shape(source) for source in node.all_input_nodes]
    biased = node.target is aten.mm.default or shape(node.args[0]) == value.shape[1:]
    return biased and None not in sizes and value.device.type == "cpu" and value.dtype in _DTYPES


def _operands(node: fx.Node) -> tuple[Any, Any]:
    left, right = node.args[-2:]
    return left, right


def _is_large(node: fx.Node, least: int | None) -> bool:
    """Whether a look at the operand costs little; never so if there is nothing to see."""
    left, right = _operands(node)
    (rows, inner), columns = left.meta["val"].shape, right.meta["val"].shape[1]
    return least is not None and rows * inner * columns >= least


def _gather(graph: fx.Graph, node: fx.Node, rows: dict[fx.Node, fx.Node] | None) -> None:
    """``node`` by events of its left operand. rows: weights that are laid out by rows so far; None if kernels do it."""
    left, right = _operands(node)
    if rows is not None and not right.meta["val"].is_contiguous():
        if right not in rows:
            with inserting_after(graph, [right]):
                rows[right] = call(graph, ROWS, right)
        right = rows[right]
    bias = node.args[0] if node.target is aten.addmm.default else None
    with graph.inserting_before(node):
        _replace(graph, node, call(graph, PRODUCT, bias, left, right, CROSSOVER, 0))


def _scatter(graph: fx.Graph, node: fx.Node, source: fx.Node, right: fx.Node, least: dict[fx.Node, int]) -> None:
    """``node``, the product of ``source`` transposed with ``right``, by events of one of them, if that is worth it."""
    with graph.inserting_before(node):
        if _is_large(node, least.get(source)):
            _replace(graph, node, _outer(graph, source, right))
        elif _is_large(node, least.get(right)):
            made = call(graph, aten.permute.default, _outer(graph, right, source), [1, 0])
            if not primals_and_tangents(graph)[1]:  # what a forward saves must lie as its backward was told
                made = call(graph, aten.clone.default, made, memory_format=torch.contiguous_format)
            _replace(graph, node, made)


def outer_crossover(rows: int) -> float:
    """The density of ``z [rows, K]`` up to which ``z^T g`` is done by events."""
    return next(density for fewer, density in OUTER_CROSSOVERS if fewer is None or rows < fewer)


def _outer(graph: fx.Graph, z: fx.Node, g: fx.Node) -> fx.Node:
    return call(graph, OUTER, z, g, outer_crossover(z.meta["val"].shape[0]), 0)


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
