"""Products with weights, row by row: the work of a step that can be done for several steps at a time.

The tensors of several steps are stacked: the rows of all of them, one below the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from reroll.graph.editing import aten, call, constants, shape

_TO_INPUTS = aten.convolution_backward.default  # here only where it gives nothing but the gradient of the inputs
_ROWS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0,),
    aten.addmm.default: (1,),
    aten.convolution.default: (0,),
    aten.embedding.default: (1,),
    _TO_INPUTS: (0, 1),
}
"""Which operands of a product have rows along their first dimension, as the result has."""


LARGEST = {"cpu": 4 * 2**20}  # bytes that are brought together: about what a core's cache holds
ELSEWHERE = 512 * 2**20  # a card fills itself with many rows alone, and reads a weight once for all of them


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


def within(members: Sequence[fx.Node], operands: Any) -> Iterator[list[fx.Node]]:
    """Runs of two and more members whose operands have at most so many bytes together as ``LARGEST`` says.

    operands: of a member, the nodes that would be brought together for it.
    """
    part: list[fx.Node] = []
    total = 0
    for member in members:
        values = [node.meta["val"] for node in operands(member)]
        nbytes = sum(value.nbytes for value in values)
        if total + nbytes > LARGEST.get(values[0].device.type, ELSEWHERE):
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


def mask_unread(graph: fx.Graph) -> None:
    """Ask convolutions for no gradient that is not read any more."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        read = {user.args[1] for user in node.users}
        before: Any = node.args[-1]
        mask = [asked and place in read for place, asked in enumerate(before)]
        if mask != before:
            node.args = (*node.args[:-1], mask)
            node.meta["val"] = tuple(
                value if asked else None for value, asked in zip(node.meta["val"], mask, strict=True)
            )
