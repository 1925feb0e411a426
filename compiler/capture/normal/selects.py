"""Integer indices, windows and pieces of tensors, all written as ``torch.select``."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from reroll.graph.effects import example, spelled
from reroll.graph.inplace import out_of_place
from reroll.graph.lines import take_line

_WINDOW = 16
_BACK = 16  # reads of one tensor in a step
_FEW = 6


def replace(old: fx.Node, new: fx.Node) -> None:
    """Put a node in the place of another one, which goes."""
    new.meta = dict(old.meta) | {k: v for k, v in new.meta.items() if k == "example_value"}
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def select(graph: fx.Graph, base: fx.Node, dim: int, index: int, row: torch.Tensor | None = None) -> fx.Node:
    """A new select node, with its example, which is ``row`` where that is known; a squeeze where there is but one row,
    which is no step of time."""
    value = example(base)
    if value is not None and value.shape[dim] == 1:
        node = graph.call_function(torch.squeeze, (base, dim))
    else:
        node = graph.call_function(torch.select, (base, dim, index))
    if value is not None:
        node.meta["example_value"] = value.select(dim, index) if row is None else row
    take_line(node, base)
    return node


def read_before(graph: fx.Graph, nodes: Iterable[fx.Node]) -> bool:
    """Read rows of a tensor that are read in no even order (a permutation, squares) before the loop that uses them,
    right behind the tensor: to the loop they are a list. Says whether there are any among these nodes."""
    groups = defaultdict[Any, list[fx.Node]](list)
    for node in nodes:
        if node.target is torch.select and node.op == "call_function":
            groups[node.args[0], node.args[1]].append(node)
    uneven = [rows for rows in groups.values() if not _are_even([row.args[2] for row in rows])]
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for rows in uneven:
        base: Any = rows[0].args[0]
        at = first.prev if base.op in ("placeholder", "get_attr") else base
        for row in rows:
            at.append(row)
            at = row
    return bool(uneven)


def _are_even(numbers: Sequence[Any]) -> bool:
    """Whether most numbers follow one of a few before them at the same distance."""
    for back in range(1, min(_BACK, len(numbers) // 3) + 1):
        apart = Counter(one - other for one, other in zip(numbers[back:], numbers, strict=False))
        if 4 * apart.most_common(1)[0][1] >= 3 * (len(numbers) - back):
            return True
    return len(numbers) < _FEW


def as_tuple(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """A basic index as one entry per dimension, with None where it makes a new one; None if it is not basic."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(_is_basic(item) for item in items) or sum(item is Ellipsis for item in items) > 1:
        return None
    missing = ndim - sum(item is not None and item is not Ellipsis for item in items)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    return (*items[:at], *(slice(None),) * missing, *items[at + 1 :])


def _is_basic(item: Any) -> bool:
    if isinstance(item, slice):
        return all(isinstance(x, int | None) for x in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or (isinstance(item, int) and not isinstance(item, bool))


def open_windows(graph: fx.Graph) -> None:
    """Windows ``x[t:t+w]`` that move along a tensor become stacks of selects."""
    groups: dict[Any, list[tuple[fx.Node, int]]] = {}
    for node in graph.nodes:
        window = _window(node)
        if window is not None:
            dim, start, width = window
            groups.setdefault((_unwritten(node.args[0]), dim, width), []).append((node, start))
    for (_, dim, width), members in groups.items():
        if len({start for _, start in members}) >= 3:
            for node, start in members:
                _open(graph, node, dim, start, width)


def _unwritten(base: Any) -> Any:
    """A tensor before anything was written into it."""
    while isinstance(base, fx.Node) and base.target is out_of_place and len(base.args[1]) == 1:  # type: ignore[arg-type]
        base = base.args[3]
    return base


def _window(node: fx.Node) -> tuple[int, int, int] | None:
    """(dimension, start, width) of the first short slice that a node takes of a tensor."""
    value = example(node.args[0]) if node.op == "call_function" and node.target is operator.getitem else None
    index = as_tuple(node.args[1], value.dim()) if value is not None else None
    if index is None or value is None or None in index:
        return None
    for dim, item in enumerate(index):
        if not isinstance(item, slice) or item == slice(None) or item.step not in (None, 1):
            continue
        start, stop, _ = item.indices(value.shape[dim])
        if 0 < stop - start <= _WINDOW and stop - start < value.shape[dim]:
            return dim, start, stop - start
    return None


def _open(graph: fx.Graph, node: fx.Node, dim: int, start: int, width: int) -> None:
    base: Any = node.args[0]
    value = example(base)
    index = as_tuple(node.args[1], value.dim() if value is not None else 0)
    assert index is not None
    with graph.inserting_before(node):
        rows = [select(graph, base, dim, at) for at in range(start, start + width)]
        stacked = graph.call_function(torch.stack, (rows, dim))
        rest = (*index[:dim], slice(None), *index[dim + 1 :])
        if any(other != slice(None) for other in rest):
            stacked.meta["example_value"] = torch.stack([row.meta["example_value"] for row in rows], dim)
            stacked = graph.call_function(operator.getitem, (stacked, rest))
    stacked.meta["example_value"] = example(node)
    replace(node, stacked)


def to_select(graph: fx.Graph, node: fx.Node) -> None:
    """Integer indices, ``select``, ``unbind`` and pieces of size one of ``split`` and ``chunk`` become selects."""
    if not node.all_input_nodes:
        return
    base = node.all_input_nodes[0]
    with graph.inserting_before(node):
        found = _indexed(graph, node, base)
    if found is not None:
        found.meta["example_value"] = example(node)
        replace(node, found)


def _indexed(graph: fx.Graph, node: fx.Node, base: fx.Node) -> fx.Node | None:
    value, name = example(base), spelled(node)
    if name in ("select", "narrow") and value is not None and len(node.args) >= 3 and not node.kwargs:
        dim, at = node.args[1], node.args[2]
        if not isinstance(dim, int) or not isinstance(at, int) or (name == "narrow" and node.args[3] != 1):
            return None
        dim, at = dim % value.dim(), at % value.shape[dim]
        row = select(graph, base, dim, at, example(node) if name == "select" else None)
        return row if name == "select" else _unsqueezed(graph, row, dim)
    if name != "getitem" or node.op != "call_function":
        return None
    if value is not None:
        return _getitem(graph, node, base, value)
    return _piece(graph, node, base)


def _getitem(graph: fx.Graph, node: fx.Node, base: fx.Node, value: torch.Tensor) -> fx.Node | None:
    items = as_tuple(node.args[1], value.dim())
    if items is None or not any(isinstance(item, int) for item in items):
        return None
    rest = tuple(item for item in items if not isinstance(item, int))
    whole, left = all(item == slice(None) for item in rest), 0
    for dim, item in enumerate(item for item in items if item is not None):
        if isinstance(item, int):
            known = example(node) if whole and len(rest) == len(items) - 1 else None
            base = select(graph, base, left, item % value.shape[dim], known)
        else:
            left += 1
    if whole:
        return base
    return graph.call_function(operator.getitem, (base, rest))


def _piece(graph: fx.Graph, node: fx.Node, pieces: fx.Node) -> fx.Node | None:
    """Item i of ``unbind``, or of ``split``/``chunk``/``tensor_split`` into pieces of size one."""
    name, at = spelled(pieces), node.args[1]
    if name not in ("unbind", "split", "chunk", "tensor_split") or not isinstance(at, int):
        return None
    base = pieces.all_input_nodes[0]
    value, piece = example(base), example(node)
    if value is None or piece is None:
        return None
    position = 1 if name == "unbind" else 2
    dim = pieces.args[position] if len(pieces.args) > position else pieces.kwargs.get("dim", 0)
    if not isinstance(dim, int):
        return None
    dim %= value.dim()
    count = len(pieces.meta["example_value"])
    if name == "unbind":
        return select(graph, base, dim, at % count, piece)
    if count != value.shape[dim]:
        return None
    return _unsqueezed(graph, select(graph, base, dim, at % count), dim)


def _unsqueezed(graph: fx.Graph, row: fx.Node, dim: int) -> fx.Node:
    node = graph.call_function(torch.unsqueeze, (row, dim))
    value = example(row)
    node.meta["example_value"] = None if value is None else value.unsqueeze(dim)
    return node
