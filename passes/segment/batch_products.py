"""Loop distribution: products of several steps with one weight, none of which needs another's result, become one.

What is not in the cycle of the carry needs no loop: ``x_t @ W`` for all t is one product of all rows of ``x``. The same
holds for the readout, for convolutions with one kernel, and for products that a backward repeats from saved values.
Rows of a product do not depend on each other, so only the rounding of sums may change. Method: loop distribution,
Allen and Kennedy, Optimizing Compilers for Modern Architectures, 2001, section 5.2.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from reroll.graph.editing import aten, call, in_order, inserting_after, levels, reads_memory, sort
from reroll.graph.memory import origin
from reroll.program.context import Context
from reroll.program.registry import register_pass
from reroll.segment.products import concatenated, in_time, places_of_rows, products, results, rows, within

_MATRICES = (aten.mm.default, aten.addmm.default)
# Rows of a product from which on those of several steps hold memory for nothing (benchmarks/results/rewrites.json).
_ENOUGH = 64


@register_pass("batch-products", on="half")
def batch_products(half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The graph with products of one weight done together where none depends on another.

    A graph whose order or layout matters is left as it is.
    """
    graph = half.graph
    for group in [] if in_order(graph) or reads_memory(graph) else products(graph):
        if context.vectors and _has_enough_rows(group[0]):
            continue
        level = levels(graph, set(group))
        together: dict[int, list[fx.Node]] = defaultdict(list)
        for node in group:
            together[level[node]].append(node)
        for members in together.values():
            for part in within(members, lambda node: [*results(node), rows(node)]):
                _join(graph, part)
        sort(graph)
    _take_whole(graph)
    graph.eliminate_dead_code()
    half.recompile()
    return half


def _has_enough_rows(node: fx.Node) -> bool:
    """Whether a product of matrices on a CPU, whose weight may be packed, has so many rows that more gain nothing."""
    return node.target in _MATRICES and int(rows(node).meta["val"].shape[0]) >= _ENOUGH


def _join(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """One product in the place of several."""
    places = places_of_rows(members[0])
    members, *columns = in_time([members, *([_operand(node, place) for node in members] for place in places)])
    first = members[0]
    with inserting_after(graph, [source for member in members for source in member.all_input_nodes]):
        operands = list(first.args)
        for place, column in zip(places, columns, strict=True):
            operands[place] = concatenated(graph, column, 0)
        product = call(graph, first.target, *operands, **first.kwargs)
        if results(first)[0] is not first:
            product = call(graph, operator.getitem, product, 0)
        start = 0
        for member, part in zip(members, columns[0], strict=True):
            stop = start + part.meta["val"].shape[0]
            for result in results(member):
                result.replace_all_uses_with(call(graph, aten.slice.Tensor, product, 0, start, stop))
            start = stop
    for node in [node for member in members for node in dict.fromkeys([*results(member), member])]:
        graph.erase_node(node)


def _take_whole(graph: fx.Graph) -> None:
    """What is put together again of all the steps of a product is the product, but for what a half gives."""
    given = {origin(node) for node in graph.output_node().all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        whole = _product_of(node)
        if whole is not None and node not in given and whole.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(whole)
            graph.erase_node(node)


def _product_of(node: fx.Node) -> fx.Node | None:
    """What a node puts the parts of together, in their order and without one left out, along the first dimension."""
    parts: Any = node.args[0]
    if len(node.args) > 1 and node.args[1] != 0:
        return None
    if any(part.target is not aten.slice.Tensor or len(part.args) != 4 or part.args[1] != 0 for part in parts):
        return None
    ends = [0, *(part.args[3] for part in parts)]
    whole: fx.Node = parts[0].args[0]
    complete = ends[-1] == whole.meta["val"].shape[0] and ends[:-1] == [part.args[2] for part in parts]
    return whole if complete and all(part.args[0] is whole for part in parts) else None


def _operand(node: fx.Node, place: int) -> fx.Node:
    found = node.args[place]
    assert isinstance(found, fx.Node)
    return found
