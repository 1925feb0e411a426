"""Tensors of several steps as one: the rows of all of them, one below the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from reroll.graph.editing import aten, call, shape

LARGEST = 4 * 2**20  # bytes that are brought together: about what a core's cache holds


def within(members: Sequence[fx.Node], operands: Any) -> Iterator[list[fx.Node]]:
    """Runs of two and more members whose operands have at most ``LARGEST`` bytes together.

    operands: of a member, the nodes that would be brought together for it.
    """
    part: list[fx.Node] = []
    total = 0
    for member in members:
        nbytes = sum(node.meta["val"].nbytes for node in operands(member))
        if total + nbytes > LARGEST:
            if len(part) > 1:
                yield part
            part, total = [], 0
        part.append(member)
        total += nbytes
    if len(part) > 1:
        yield part


def times(nodes: Sequence[fx.Node]) -> list[int] | None:
    """The indices of nodes that are items of one tensor along one dimension, as its steps are; None if they are not."""
    first = nodes[0]
    if any(node.target is not aten.select.int or node.args[:2] != first.args[:2] for node in nodes):
        return None
    sizes: Any = shape(first.args[0])
    if sizes is None:
        return None
    indices: Any = [node.args[2] for node in nodes]
    return [index % sizes[first.args[1]] for index in indices]


def in_time(columns: Sequence[Sequence[fx.Node]]) -> list[tuple[fx.Node, ...]]:
    """Columns of nodes, reordered alike so that items of one tensor are in rising order, where a column is of such."""
    at = next((steps for column in reversed(columns) if (steps := times(column))), range(len(columns[0])))
    order = sorted(range(len(at)), key=at.__getitem__)
    return [tuple(column[place] for place in order) for column in columns]


def concatenated(graph: fx.Graph, nodes: Sequence[fx.Node], dim: int) -> fx.Node:
    """The nodes along a dimension; of successive items of one tensor, as ``times`` tells, a view."""
    at = times(nodes)
    sizes = shape(nodes[0])
    if dim == 0 and at and sizes and at == list(range(at[0], at[0] + len(at))):
        base: Any = nodes[0].args[0]
        whole = shape(base)
        moved: Any = nodes[0].args[1]
        assert whole is not None
        moved %= len(whole)
        if moved:
            base = call(graph, aten.permute.default, base, [moved, *(d for d in range(len(whole)) if d != moved)])
        if len(at) != whole[moved]:
            base = call(graph, aten.slice.Tensor, base, 0, at[0], at[-1] + 1)
        return call(graph, aten.reshape.default, base, [len(at) * sizes[0], *sizes[1:]])
    return call(graph, aten.cat.default, list(nodes), dim)


def turned(node: fx.Node) -> fx.Node | None:
    """The matrix whose transpose a node is; None if it is no transpose."""
    permuted = node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.all_input_nodes[0] if permuted or node.target is aten.t.default else None
