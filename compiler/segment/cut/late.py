"""The order of a backward: what it makes of saved values alone comes right before its first use.

A joint graph has all of the forward before the first gradient, so a cut backward would make all again at its beginning,
beside the whole tape. Inductor orders nodes itself; this is for halves that torch runs node by node.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from reroll.graph.editing import ancestors, in_order, primals_and_tangents
from reroll.graph.memory import graph_peak, storage_nbytes


def make_late(half: fx.GraphModule) -> None:
    """Order a backward so, in place, if it holds less at its peak then."""
    graph = half.graph
    if in_order(graph):
        return
    early, held = list(graph.nodes), _peak(graph)
    _put(_late(graph))
    if _peak(graph) >= held:
        _put(early)
    half.recompile()


def _peak(graph: fx.Graph) -> int:
    """The most bytes that a run holds which owns all that it is given."""
    return graph_peak(
        graph, [(storage_nbytes(n.meta.get("val")), (n.name,)) for n in graph.find_nodes(op="placeholder")]
    )


def _late(graph: fx.Graph) -> list[fx.Node]:
    """The nodes, those that are made of no gradient behind all that are not needed for them."""
    behind = set(primals_and_tangents(graph)[1])
    for node in graph.nodes:
        behind |= {node} if behind.intersection(node.all_input_nodes) else set()
    order, done = {node: at for at, node in enumerate(graph.nodes)}, dict[fx.Node, None]()
    for node in graph.nodes:
        if node.op != "call_function" or node in behind or not node.users:
            done.update(dict.fromkeys(sorted(ancestors([node], done), key=order.__getitem__)))
    return list(done)


def _put(nodes: Sequence[fx.Node]) -> None:
    """Bring the nodes of a graph in an order."""
    for before, node in itertools.pairwise(nodes):
        before.append(node)
