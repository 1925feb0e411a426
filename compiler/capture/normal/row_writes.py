"""Rows that are written one by one into a tensor, and tensors that grow by ``torch.cat``, become one operation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from reroll.capture.normal.selects import as_tuple, replace
from reroll.graph.effects import example
from reroll.graph.inplace import out_of_place

_SETITEM = "function:operator:setitem"
_PICKS = ("function:operator:getitem", "method:select", "function:torch:select")


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
    place = _row_part(items)
    return place[:2] if place is not None and all(item == slice(None) for item in place[2]) else None


def _row_part(items: tuple[Any, ...] | None) -> tuple[int, int, tuple[Any, ...]] | None:
    """(dimension, index, rest) of an index that takes one row, or the part ``rest`` of the first one that it names."""
    rows = [(dim, at) for dim, at in enumerate(items or ()) if isinstance(at, int)]
    if items is None or not rows or None in items:
        return None
    dim, at = rows[0]
    return dim, at, (*items[:dim], *items[dim + 1 :])


def update_rows(graph: fx.Graph, node: fx.Node) -> None:
    """An update of a row, ``out[t] += y``, becomes a read of the row, the operation, and a write of the row."""
    found = _updated_row(node)
    value = example(node)
    if found is None or value is None:
        return
    dim, at, chain, rest = found
    args: Any = node.args
    index: Any = (*(slice(None),) * dim, at)
    with graph.inserting_before(node):
        row = graph.call_function(operator.getitem, (args[3], index))
        changed = graph.call_function(out_of_place, (args[0], (0,), (chain,), row, *rest), dict(node.kwargs))
        written = graph.call_function(out_of_place, (_SETITEM, (0,), ((),), args[3], index, changed))
    for made in (row, changed):
        made.meta = dict(node.meta, example_value=value.select(dim, at))
    row.meta["random"] = written.meta["random"] = False
    replace(node, written)


def _updated_row(node: fx.Node) -> tuple[int, int, tuple[Any, ...], tuple[Any, ...]] | None:
    """(dimension, index, views of the row, other operands) of an operation that updates one row, or a part of one."""
    args: Any = node.args
    value = example(node)
    if node.target is not out_of_place or args[1] != (0,) or value is None:
        return None
    chain, rest = args[2][0], args[4:]
    if not chain:
        place = _row_part(as_tuple(rest[0], value.dim())) if args[0] == _SETITEM else None
        whole = place is None or all(item == slice(None) for item in place[2])
        return (
            None if place is None or whole else (place[0], place[1] % value.shape[place[0]], (), (place[2], *rest[1:]))
        )
    operation, extra, named = chain[0]
    if operation not in _PICKS or named:
        return None
    if operation.endswith("getitem"):
        place = _row_part(as_tuple(extra[0], value.dim()))
    else:
        place = (extra[0] % value.dim(), extra[1], ()) if len(extra) == 2 else None
    if place is None:
        return None
    dim, at, part = place
    views: tuple[Any, ...] = (
        () if all(item == slice(None) for item in part) else (("function:operator:getitem", (part,), {}),)
    )
    return dim, at % value.shape[dim], (*views, *chain[1:]), rest


def forward_read(graph: fx.Graph, node: fx.Node) -> None:
    """A read of a row that was written before reads the written value instead."""
    if node.target is not torch.select or node.op != "call_function":
        return
    base, dim, at = node.args
    while (write := _row_write(base)) is not None and write[1] == dim and write[2] != at:
        base = write[0]
    read = example(node)
    if write is not None and write[1] == dim and read is not None:
        assert isinstance(base, fx.Node)
        node.replace_all_uses_with(_shaped(graph, write[3], read, base))
        return
    node.args = (base, dim, at)


def put_rows(base: torch.Tensor, dim: int, indices: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
    """``base`` with ``rows[i]`` (stacked along ``dim``) written at ``indices[i]`` of dimension ``dim``."""
    return base.index_copy(dim, torch.tensor(indices, device=base.device), rows)


def collect_rows(graph: fx.Graph, node: fx.Node) -> None:
    """A chain of row writes becomes one stack of the rows."""
    last = _row_write(node)
    if last is None:
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
        stacked = graph.call_function(torch.stack, (shaped, dim))
        if len(rows) < value.shape[dim]:
            stacked.meta = dict(node.meta, example_value=None)
            stacked = graph.call_function(put_rows, (base, dim, tuple(sorted(rows)), stacked))
    stacked.meta["example_value"] = value
    replace(node, stacked)


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
    """A tensor that grows by ``torch.cat`` becomes one ``torch.cat`` of all pieces."""
    pieces, dim = _cat(node)
    if not pieces:
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
