"""Rows that are written one by one into a tensor, and tensors that grow by ``torch.cat``, become one operation."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.capture.normal.modes import cut, is_cut
from reroll.capture.normal.selects import as_tuple, replace
from reroll.graph.effects import example
from reroll.graph.inplace import out_of_place

_SETITEM = "function:operator:setitem"
_GETITEM = "function:operator:getitem"
_INDEX_COPY = "method:index_copy_"


def _row_write(node: Any) -> tuple[fx.Node, int, int, Any] | None:
    """(tensor, dimension, index, row) of a node that writes one row of a tensor."""
    if not isinstance(node, fx.Node) or node.target is not out_of_place or node.args[0] != _SETITEM:
        return None
    if node.args[2] != ((),):
        return None
    args: Any = node.args
    base, index, row = args[3:6]
    value = example(base)
    items = as_tuple(index, value.dim()) if value is not None else None
    if items is None or value is None:
        return None
    place = _one_row(items)
    return None if place is None else (base, place[0], place[1] % value.shape[place[0]], row)


def _one_row(items: tuple[Any, ...]) -> tuple[int, int] | None:
    """(dimension, index) of an index that takes one row and all of every other dimension."""
    rows = [(dim, at) for dim, at in enumerate(items) if isinstance(at, int)]
    return rows[0] if len(rows) == 1 and all(isinstance(at, int) or at == slice(None) for at in items) else None


def update_rows(graph: fx.Graph, node: fx.Node) -> None:
    """An update of a row, ``out[t] += y``, becomes a read of the row, the operation, and a write of the row."""
    found = _updated_row(node)
    value = example(node)
    if found is None or value is None:
        return
    args: Any = node.args
    index: Any = (*(slice(None),) * found.dim, found.at)
    with graph.inserting_before(node):
        row = graph.call_function(operator.getitem, (args[3], index))
        changed = graph.call_function(
            out_of_place, (found.operation, (0,), (found.views,), row, *found.operands), dict(node.kwargs)
        )
        written = graph.call_function(out_of_place, (_SETITEM, (0,), ((),), args[3], index, changed))
    for made in (row, changed):
        made.meta = dict(node.meta, example_value=value.select(found.dim, found.at))
    row.meta["random"] = written.meta["random"] = False
    replace(node, written)


@dataclass(frozen=True)
class _Update:
    """An operation that updates one row of a tensor, or a part of the row."""

    dim: int
    at: int
    operation: str
    views: tuple[Any, ...]
    """From the row to what is updated."""
    operands: tuple[Any, ...]


def _updated_row(node: fx.Node) -> _Update | None:
    args: Any = node.args
    value = example(node)
    if node.target is not out_of_place or args[1] != (0,) or value is None:
        return None
    operation, chain, rest = args[0], args[2][0], args[4:]
    if chain:
        place = _picked(chain[0], value)
        return None if place is None else _Update(*place[:2], operation, (*place[2], *chain[1:]), rest)
    if operation == _INDEX_COPY and len(rest) == 3 and not node.kwargs:
        dim, at = rest[0], _one_number(rest[1])
        if not isinstance(dim, int) or at is None or value.dim() == 0:
            return None
        dim %= value.dim()
        return _Update(dim, at % value.shape[dim], "method:copy_", (_unsqueezing(dim),), (rest[2],))
    if operation != _SETITEM or _row_write(node) is not None:
        return None
    place = _row_part(as_tuple(rest[0], value.dim()), value)
    return None if place is None else _Update(*place[:2], operation, place[2], (slice(None), *rest[1:]))


def _picked(view: tuple[Any, ...], value: torch.Tensor) -> tuple[int, int, tuple[Any, ...]] | None:
    """(dimension, index, views of the row) of a view that takes one row of a tensor, or a part of one."""
    operation, extra, named = view
    name = operation.rpartition(":")[2]
    if named:
        return None
    if name == "getitem":
        return _row_part(as_tuple(extra[0], value.dim()), value)
    if not all(isinstance(each, int) for each in extra) or len(extra) != {"select": 2, "narrow": 3}.get(name):
        return None
    dim = extra[0] % value.dim()
    views = () if name == "select" else (_unsqueezing(dim),)
    return None if name == "narrow" and extra[2] != 1 else (dim, extra[1] % value.shape[dim], views)


def _row_part(items: tuple[Any, ...] | None, value: torch.Tensor) -> tuple[int, int, tuple[Any, ...]] | None:
    """(dimension, index, views of the row) of an index that takes a row, as ``x[:, t]`` and ``x[:, t:t + 1]`` do, or a
    part of the first row that it names."""
    if items is None or None in items:
        return None
    for dim, at in enumerate(items):
        if isinstance(at, int):
            part = (*items[:dim], *items[dim + 1 :])
            whole = all(item == slice(None) for item in part)
            return dim, at % value.shape[dim], () if whole else ((_GETITEM, (part,), {}),)
    for dim, at in enumerate(items):
        places = range(value.shape[dim])[at]
        if len(places) == 1 < value.shape[dim]:
            part = (*items[:dim], slice(None), *items[dim + 1 :])
            whole = all(item == slice(None) for item in part)
            return dim, places[0], (_unsqueezing(dim), *(() if whole else ((_GETITEM, (part,), {}),)))
    return None


def _unsqueezing(dim: int) -> tuple[Any, ...]:
    return "method:unsqueeze", (dim,), {}


def _one_number(index: Any) -> int | None:
    """The number in a tensor of one number that the graph makes, as ``torch.tensor([3])``."""
    made = isinstance(index, fx.Node) and index.target is torch.tensor
    numbers: Any = index.args[0] if made and index.args else None
    one = isinstance(numbers, list | tuple) and len(numbers) == 1 and type(numbers[0]) is int
    return numbers[0] if one else None


def forward_read(graph: fx.Graph, node: fx.Node) -> None:
    """A read of a row that was written before reads the written value instead."""
    if node.target is not torch.select or node.op != "call_function":
        return
    given: Any = node.args[0]
    dim, at = node.args[1:]
    base = given.args[0] if is_cut(given) else given
    while (write := _row_write(base)) is not None and write[1] == dim and write[2] != at:
        base = write[0]
    read = example(node)
    if write is not None and write[1] == dim and read is not None:
        assert isinstance(base, fx.Node)
        row = _shaped(graph, write[3], read, base)
        node.replace_all_uses_with(cut(graph, row, node) if is_cut(given) else row)
    elif not is_cut(given):
        node.args = (base, dim, at)


def put_rows(base: torch.Tensor, dim: int, indices: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
    """``base`` with ``rows[i]`` (stacked along ``dim``) written at ``indices[i]`` of dimension ``dim``."""
    return base.index_copy(dim, torch.tensor(indices, device=base.device), rows)


def collect_rows(graph: fx.Graph, node: fx.Node) -> None:
    """A chain of row writes becomes one stack of the rows. From its end on: what nobody reads any more goes."""
    last = _row_write(node)
    if last is None or _is_gone(graph, node):
        return
    rows: dict[int, Any] = {}
    base: Any = node
    while (write := _row_write(base)) is not None and write[1] == last[1] and (base is node or len(base.users) == 1):
        rows.setdefault(write[2], (write[3], base))
        base = write[0]
    value = example(base)
    if len(rows) < 2 or value is None:
        return
    dim, slot = last[1], value.select(last[1], 0)
    shaped = [_shaped(graph, row, slot, at) for row, at in (rows[index] for index in sorted(rows))]
    with graph.inserting_before(node):
        if len(rows) < value.shape[dim]:
            stacked = graph.call_function(torch.stack, (shaped, dim))
            stacked.meta = dict(node.meta, example_value=None)
            stacked = graph.call_function(put_rows, (base, dim, tuple(sorted(rows)), stacked))
        else:
            stacked = _stacked(graph, shaped, dim, value)
    stacked.meta["example_value"] = value
    replace(node, stacked)


def _is_gone(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether nobody reads a node, which goes then."""
    if not node.users:
        graph.erase_node(node)
        return True
    return False


def _stacked(graph: fx.Graph, rows: list[fx.Node], dim: int, value: torch.Tensor) -> fx.Node:
    """The stack of rows, laid out as the tensor into which they were written."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda each: (-strides[each], each))
    if value.is_contiguous() or not value.permute(order).is_contiguous():
        return graph.call_function(torch.stack, (rows, dim))
    others = [each - (each > dim) for each in order if each != dim]
    if others != sorted(others):
        rows = [graph.call_method("permute", (row, others)) for row in rows]
        for row in rows:
            row.meta["example_value"] = value.select(dim, 0).permute(others)
    dense = graph.call_function(torch.stack, (rows, order.index(dim)))
    dense.meta["example_value"] = value.permute(order)
    return graph.call_method("permute", (dense, [order.index(each) for each in range(value.dim())]))


def _shaped(graph: fx.Graph, written: Any, slot: torch.Tensor, write: fx.Node) -> fx.Node:
    """A written value with the shape and dtype of the row that it fills."""
    value = example(written)
    row: fx.Node = written
    with graph.inserting_before(write):
        if not isinstance(written, fx.Node):
            row = graph.call_function(
                torch.full, (tuple(slot.shape), written), {"dtype": slot.dtype, "device": slot.device}
            )
            row.meta["example_value"] = slot
            return row
        if value is None or value.dtype != slot.dtype:
            row = graph.call_method("to", (row, slot.dtype))
            row.meta["example_value"] = None if value is None else value.to(slot.dtype)
        if value is not None and value.dim() > slot.dim():
            row = graph.call_method("reshape", (row, tuple(value.shape[value.dim() - slot.dim() :])))
        if value is None or value.shape != slot.shape:
            row = graph.call_method("expand", (row, tuple(slot.shape)))
            row.meta["example_value"] = slot
    return row


def collect_cat(graph: fx.Graph, node: fx.Node) -> None:
    """A tensor that grows by ``torch.cat`` becomes one ``torch.cat`` of all pieces. From its end on, as above."""
    pieces, dim = _cat(node)
    if not pieces or _is_gone(graph, node):
        return
    while (inner := _cat(pieces[0]))[0] and inner[1] == dim and len(pieces[0].users) == 1:
        pieces = [*inner[0], *pieces[1:]]
    if len(pieces) > len(_cat(node)[0]):
        with graph.inserting_before(node):
            flat = graph.call_function(torch.cat, (pieces, dim))
        flat.meta["example_value"] = example(node)
        replace(node, flat)


def _cat(node: Any) -> tuple[list[Any], int]:
    if not isinstance(node, fx.Node) or node.target is not torch.cat or node.op != "call_function" or not node.args:
        return [], 0
    value = example(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if value is None or not isinstance(dim, int) or not isinstance(node.args[0], list | tuple):
        return [], 0
    return list(node.args[0]), dim % value.dim()
