"""Rows that are written one by one into a tensor, and tensors that grow by ``torch.cat``, become one operation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from reroll.effects import example
from reroll.indices import as_tuple, replace
from reroll.inplace import out_of_place

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
    rows = [(dim, at) for dim, at in enumerate(items) if isinstance(at, int)]
    return (
        rows[0] if len(rows) == 1 and all(item == slice(None) for item in items if not isinstance(item, int)) else None
    )


def update_rows(graph: fx.Graph, node: fx.Node) -> None:
    """An update of a row, ``out[t] += y``, becomes a read of the row, the operation, and a write of the row."""
    place = _updated_row(node)
    value = example(node)
    if place is None or value is None:
        return
    dim, at = place
    args: Any = node.args
    operation, (chain,), base, rest = args[0], args[2], args[3], args[4:]
    index: Any = (*(slice(None),) * dim, at)
    with graph.inserting_before(node):
        row = graph.call_function(operator.getitem, (base, index))
        changed = graph.call_function(out_of_place, (operation, (0,), (chain[1:],), row, *rest), dict(node.kwargs))
        written = graph.call_function(out_of_place, (_SETITEM, (0,), ((),), base, index, changed))
    for made in (row, changed):
        made.meta = dict(node.meta, example_value=value.select(dim, at))
    row.meta["random"] = written.meta["random"] = False
    replace(node, written)


def _updated_row(node: fx.Node) -> tuple[int, int] | None:
    """(dimension, index) of the row that an update through a view changes, where the view starts with a row."""
    args: Any = node.args
    if node.target is not out_of_place or args[1] != (0,) or not args[2][0]:
        return None
    value = example(node)
    operation, extra, named = args[2][0][0]
    if operation not in _PICKS or named or value is None:
        return None
    if operation.endswith("getitem"):
        items = as_tuple(extra[0], value.dim())
        place = _one_row(items) if items is not None else None
    else:
        place = (extra[0] % value.dim(), extra[1]) if len(extra) == 2 else None
    return None if place is None else (place[0], place[1] % value.shape[place[0]])


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
