"""The gradient of a weight over a segment as one product over all its steps, instead of one product and sum per step.

``sum_t A_t B_t`` is the product of the blocks of A, side by side, with those of B, one below the other; the sum over
rows of a bias, and the gradients of a convolution's kernel and of an embedding, are the same over the rows of all
steps. Only the order of sums changes.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

from torch import fx

from reroll.graph.editing import aten, call, constants, deduplicate, inserting_after, reads_memory, shape
from reroll.program.context import Context
from reroll.program.registry import register_pass
from reroll.segment.products import concatenated, in_time, mask_unread, turned, within

_VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default)


class Term(NamedTuple):
    """An addend: views of a node that sums over rows. ``key`` is the same for those that may be merged."""

    addend: fx.Node
    node: fx.Node
    views: tuple[fx.Node, ...]
    key: Any


@register_pass("merge-gradients", on="half")
def merge_gradients(half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The graph with sums of products, of row sums and of gradients of kernels over steps merged."""
    graph = half.graph
    fixed = constants(graph)
    for root in [] if reads_memory(graph) else [node for node in graph.nodes if _is_root(node)]:
        _merge(graph, root, fixed, context.vectors)
    graph.eliminate_dead_code()
    mask_unread(graph)
    deduplicate(graph)
    _share_kernels(graph)
    half.recompile()
    return half


def _is_sum(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(isinstance(arg, fx.Node) and shape(arg) == shape(node) is not None for arg in node.args)


def _is_root(node: fx.Node) -> bool:
    return _is_sum(node) and not (len(node.users) == 1 and _is_sum(next(iter(node.users))))


def _addends(root: fx.Node) -> list[Any]:
    """The terms of a sum whose partial sums nobody else reads."""
    todo: list[Any] = [root]
    found = []
    while todo:
        node = todo.pop()
        if _is_sum(node) and (node is root or len(node.users) == 1):
            todo += reversed(node.args)
        else:
            found.append(node)
    return found


def _has_enough_rows(node: fx.Node) -> bool:
    """Whether a product of matrices, or a sum of rows, sums over half as many rows as its result is long and wide, or
    more: adding up results takes little time then, and operands of several steps side by side would take more memory
    than a result (benchmarks/results/rewrites.json, batch 128)."""
    if node.target not in (aten.mm.default, aten.sum.dim_IntList):
        return False
    operand: Any = node.args[0]
    summed = operand.meta["val"].numel() // max(node.meta["val"].numel(), 1)
    if node.target is aten.mm.default:
        summed = operand.meta["val"].shape[1]
    return bool(2 * summed >= max(node.meta["val"].shape, default=1))


def _merge(graph: fx.Graph, root: fx.Node, fixed: set[fx.Node], alone: bool) -> None:
    """Replace a sum by one with fewer terms. Products with one of ``fixed``, a weight, are merged if they share it.
    ``alone``: those that sum over enough rows are not merged."""
    addends = _addends(root)
    times = Counter(addends)
    groups: dict[Any, list[Term]] = defaultdict(list)
    for addend in reversed(addends):  # a backward goes down in time
        term = _term(addend) if times[addend] == 1 else None
        if term is not None and not (alone and _has_enough_rows(term.node)):
            shared = [operand.name for operand in _operands(term.node) if operand in fixed]
            groups[term.key, *shared].append(term)
    merged: set[fx.Node] = set()
    fewer: list[fx.Node] = []
    for terms in groups.values():
        by_node = {term.node: term for term in terms}
        for nodes in within(list(by_node), _operands):
            fewer.append(_joined(graph, nodes, by_node[nodes[0]].views))
            merged.update(by_node[node].addend for node in nodes)
    if fewer:
        fewer += [addend for addend in addends if addend not in merged]
        with inserting_after(graph, fewer):
            root.replace_all_uses_with(_total(graph, fewer))


def _term(addend: fx.Node) -> Term | None:
    node, views = addend, list[fx.Node]()
    while len(node.users) == 1 and node.target in _VIEWS:
        views.append(node)
        node = node.all_input_nodes[0]
    kind = _KINDS.get(node.target)
    key = kind.key(node) if kind is not None and len(node.users) == 1 else None
    if key is None:
        return None
    same = [(view.target, repr(view.args[1:])) for view in views]
    return Term(addend, node, tuple(reversed(views)), (node.target, repr(same), repr(key), node.meta["val"].dtype))


def _operands(node: fx.Node) -> Sequence[fx.Node]:
    return _KINDS[node.target].operands(node)


def _joined(graph: fx.Graph, nodes: list[fx.Node], views: Sequence[fx.Node]) -> fx.Node:
    """One node in the place of several, with the views that each of them had."""
    columns = in_time(list(zip(*map(_operands, nodes), strict=True)))
    with inserting_after(graph, [node for column in columns for node in column]):
        found = _KINDS[nodes[0].target].joined(graph, nodes[0], columns)
        for view in views:
            found = call(graph, view.target, found, *view.args[1:])
    return found


def _total(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    return reduce(lambda left, right: call(graph, aten.add.Tensor, left, right), nodes)


class Kind(NamedTuple):
    """A node that sums over rows.

    key: what must be the same in nodes that are merged; None if the node cannot be. operands: what has the rows.
    joined: one node for several, given the first of them and the columns of all their operands.
    """

    key: Callable[[Any], Any]
    operands: Callable[[Any], Sequence[Any]]
    joined: Callable[[fx.Graph, fx.Node, Sequence[Sequence[fx.Node]]], fx.Node]


def _product(graph: fx.Graph, first: fx.Node, columns: Sequence[Sequence[fx.Node]]) -> fx.Node:
    left, right = columns
    if len(set(left)) == 1:
        return call(graph, aten.mm.default, left[0], _total(graph, right))
    if len(set(right)) == 1:
        return call(graph, aten.mm.default, _total(graph, left), right[0])
    sources = [source for node in left if (source := turned(node)) is not None]
    if len(sources) == len(left):
        beside = call(graph, aten.permute.default, concatenated(graph, sources, 0), [1, 0])
    else:
        beside = concatenated(graph, left, 1)
    return call(graph, aten.mm.default, beside, concatenated(graph, right, 0))


def _row_sum(graph: fx.Graph, first: fx.Node, columns: Sequence[Sequence[fx.Node]]) -> fx.Node:
    (rows,) = columns
    dims: Any = first.args[1]
    return call(graph, first.target, concatenated(graph, rows, dims[0]), *first.args[1:], **first.kwargs)


def _kernel(graph: fx.Graph, first: fx.Node, columns: Sequence[Sequence[fx.Node]]) -> fx.Node:
    whole: Any = first.args[0]
    grads, inputs = (concatenated(graph, column, 0) for column in columns)
    mask = [place == first.args[1] for place in range(3)]
    made = call(graph, whole.target, grads, inputs, *whole.args[2:-1], mask)
    return call(graph, operator.getitem, made, first.args[1])


def _embedding(graph: fx.Graph, first: fx.Node, columns: Sequence[Sequence[fx.Node]]) -> fx.Node:
    return call(graph, first.target, *(concatenated(graph, column, 0) for column in columns), *first.args[2:])


def _product_key(node: Any) -> Any:
    return shape(node)


def _row_sum_key(node: Any) -> Any:
    return (node.args[1:], node.kwargs, shape(node.args[0])) if node.args[1] and shape(node.args[0]) else None


def _kernel_key(node: Any) -> Any:
    whole, place = node.args
    if getattr(whole, "target", None) is not aten.convolution_backward.default or place == 0:
        return None
    return whole.args[2:-1], place, [shape(arg) for arg in whole.all_input_nodes]


def _embedding_key(node: Any) -> Any:
    scaled, index = node.args[4], shape(node.args[1])
    return None if scaled or not index else (node.args[2:], [shape(arg) for arg in node.args[:2]])


_KINDS: dict[Any, Kind] = {
    aten.mm.default: Kind(_product_key, lambda node: node.args, _product),
    aten.sum.dim_IntList: Kind(_row_sum_key, lambda node: node.args[:1], _row_sum),
    operator.getitem: Kind(_kernel_key, lambda node: node.args[0].args[:2], _kernel),
    aten.embedding_dense_backward.default: Kind(_embedding_key, lambda node: node.args[:2], _embedding),
}


def _share_kernels(graph: fx.Graph) -> None:
    """One node for gradients of a convolution that differ only in what is asked for, as of a kernel and its bias."""
    seen: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        first = seen.setdefault(repr(node.args[:-1]), node)
        if first is not node:
            values = zip(first.meta["val"], node.meta["val"], strict=True)
            first.meta["val"] = tuple(one if other is None else other for one, other in values)
            first.args = (*first.args[:-1], [value is not None for value in first.meta["val"]])
            node.replace_all_uses_with(first)
            graph.erase_node(node)
