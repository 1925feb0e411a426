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

from torch import fx

from reroll.graph.editing import aten, behind, call, in_order, levels, reads_memory, sort
from reroll.program.context import Context
from reroll.program.registry import register_pass
from reroll.segment.products import concatenated, in_time, places_of_rows, products, results, rows, within


@register_pass("batch-products", on="half")
def batch_products(half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The graph with products of one weight done together where none depends on another.

    A graph whose order or layout matters is left as it is.
    """
    graph = half.graph
    for group in [] if in_order(graph) or reads_memory(graph) else products(graph):
        level = levels(graph, set(group))
        together: dict[int, list[fx.Node]] = defaultdict(list)
        for node in group:
            together[level[node]].append(node)
        for members in together.values():
            for part in within(members, lambda node: [*results(node), rows(node)]):
                _join(graph, part)
        sort(graph)
    graph.eliminate_dead_code()
    half.recompile()
    return half


def _join(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """One product in the place of several."""
    places = places_of_rows(members[0])
    members, *columns = in_time([members, *([_operand(node, place) for node in members] for place in places)])
    first = members[0]
    with behind(graph, [source for member in members for source in member.all_input_nodes]):
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


def _operand(node: fx.Node, place: int) -> fx.Node:
    found = node.args[place]
    assert isinstance(found, fx.Node)
    return found
