"""The normal form in which the repeating step is looked for.

After functionalisation: every integer index is a ``torch.select`` beside its only user, rows that are written one by one
into a tensor are one ``torch.stack``, a tensor that grows by ``torch.cat`` is one ``torch.cat``, and nodes that neither
have users nor effects are gone. Common subexpressions stay: merging them would blur the borders between steps.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from reroll.functional import functionalise, out_of_place

_RANDOM = (
    "rand",
    "dropout",
    "bernoulli",
    "normal",
    "multinomial",
    "poisson",
    "rrelu",
    "gumbel",
    "exponential",
    "cauchy",
)
_NOT_RANDOM = (
    "batch_norm",
    "layer_norm",
    "instance_norm",
    "group_norm",
    "normalize",
    "local_response_norm",
    "rms_norm",
)
_EFFECTS = ("copy_", "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_assert_async", "set_stream")
_SETITEM = "function:operator:setitem"
_WINDOW = 16


def normalise(graph: fx.Graph) -> fx.Graph:
    """The normal form of a Dynamo graph, as a new graph with the same inputs and outputs."""
    new = functionalise(graph)
    _drop_dead(new)
    for node in list(new.nodes):
        _open_slices(new, node)
    for node in list(new.nodes):
        _to_select(new, node)
    for node in list(new.nodes):
        _forward_read(node)
    _drop_dead(new)
    for node in reversed(list(new.nodes)):
        _collect_rows(new, node)
        _collect_cat(new, node)
    _sink_selects(new)
    _drop_dead(new)
    new.lint()
    return new


def spelled(node: fx.Node) -> str:
    """The name of what a node calls."""
    if node.op == "call_function" and node.target is out_of_place:
        return str(node.args[0]).rpartition(":")[2]
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = spelled(node).split(".")[0]
    return name not in _NOT_RANDOM and not name.endswith("layer_norm") and any(word in name for word in _RANDOM)


def has_effect(node: fx.Node) -> bool:
    """Whether a node does more than give a value, so that it stays even if nobody uses it."""
    if node.op in ("placeholder", "output", "call_module") or is_random(node):
        return True
    name = spelled(node)
    return node.op != "get_attr" and node.target is not out_of_place and name in _EFFECTS


def example(node: Any) -> torch.Tensor | None:
    """The example tensor of a node, if it has one."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta) | {k: v for k, v in new.meta.items() if k == "example_value"}
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _select(graph: fx.Graph, base: fx.Node, dim: int, index: int) -> fx.Node:
    node = graph.call_function(torch.select, (base, dim, index))
    value = example(base)
    if value is not None:
        node.meta["example_value"] = value.select(dim, index)
    node.meta["stack_trace"] = base.meta.get("stack_trace")
    return node


def _as_tuple(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """A basic index as one entry per dimension (None entries excluded); None if it is not basic."""
    items = index if isinstance(index, tuple) else (index,)
    basic = all(isinstance(i, int | slice) and not isinstance(i, bool) or i is Ellipsis for i in items)
    numbers = all(isinstance(x, int | None) for i in items if isinstance(i, slice) for x in (i.start, i.stop, i.step))
    if not basic or not numbers or sum(i is Ellipsis for i in items) > 1:
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items = (*items[:at], *(slice(None),) * (ndim - len(items) + 1), *items[at + 1 :])
    return (*items, *(slice(None),) * (ndim - len(items)))


def _open_slices(graph: fx.Graph, node: fx.Node) -> None:
    """Windows ``x[t:t+w]`` that several nodes take of one tensor become stacks of selects."""
    if node.op != "call_function" or node.target is not operator.getitem or example(node.args[0]) is None:
        return
    base: Any = node.args[0]
    value = example(base)
    assert value is not None
    index = _as_tuple(node.args[1], value.dim())
    if index is None or sum(user.target is operator.getitem for user in base.users) < 3:
        return
    for dim, item in enumerate(index):
        size = value.shape[dim]
        if not isinstance(item, slice) or item == slice(None) or item.step not in (None, 1):
            continue
        start, stop, _ = item.indices(size)
        if not 0 < stop - start <= _WINDOW or stop - start >= size:
            continue
        with graph.inserting_before(node):
            rows = [_select(graph, base, dim, at) for at in range(start, stop)]
            stacked = graph.call_function(torch.stack, (rows, dim))
            rest = (*index[:dim], slice(None), *index[dim + 1 :])
            if any(other != slice(None) for other in rest):
                stacked = graph.call_function(operator.getitem, (stacked, rest))
        stacked.meta["example_value"] = example(node)
        _replace(node, stacked)
        return


def _to_select(graph: fx.Graph, node: fx.Node) -> None:
    """Integer indices, ``select``, ``unbind`` and pieces of size one of ``split`` and ``chunk`` become selects."""
    if not node.all_input_nodes:
        return
    base = node.all_input_nodes[0]
    with graph.inserting_before(node):
        found = _indexed(graph, node, base)
    if found is not None:
        found.meta["example_value"] = example(node)
        _replace(node, found)


def _indexed(graph: fx.Graph, node: fx.Node, base: fx.Node) -> fx.Node | None:
    value, name = example(base), spelled(node)
    if name in ("select", "narrow") and value is not None and len(node.args) >= 3 and not node.kwargs:
        dim, at = node.args[1], node.args[2]
        if not isinstance(dim, int) or not isinstance(at, int) or name == "narrow" and node.args[3] != 1:
            return None
        dim, at = dim % value.dim(), at % value.shape[dim]
        row = _select(graph, base, dim, at)
        return row if name == "select" else _unsqueezed(graph, row, dim)
    if name != "getitem" or node.op != "call_function":
        return None
    if value is not None:
        return _getitem(graph, base, value, node.args[1])
    return _piece(graph, node, base)


def _getitem(graph: fx.Graph, base: fx.Node, value: torch.Tensor, index: Any) -> fx.Node | None:
    items = _as_tuple(index, value.dim())
    if items is None or not any(isinstance(item, int) for item in items):
        return None
    for dim in range(len(items) - 1, -1, -1):
        if isinstance(items[dim], int):
            base = _select(graph, base, dim, items[dim] % value.shape[dim])
    rest = tuple(item for item in items if isinstance(item, slice))
    if all(item == slice(None) for item in rest):
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
        return _select(graph, base, dim, at % count)
    if count != value.shape[dim]:
        return None
    return _unsqueezed(graph, _select(graph, base, dim, at % count), dim)


def _unsqueezed(graph: fx.Graph, row: fx.Node, dim: int) -> fx.Node:
    node = graph.call_function(torch.unsqueeze, (row, dim))
    value = example(row)
    node.meta["example_value"] = None if value is None else value.unsqueeze(dim)
    return node


def _row_write(node: Any) -> tuple[fx.Node, int, int, Any] | None:
    """(tensor, dimension, index, row) of a node that writes one row of a tensor."""
    if not isinstance(node, fx.Node) or node.target is not out_of_place or node.args[0] != _SETITEM:
        return None
    if node.args[2] != ((),):
        return None
    base, index, row = node.args[3:6]
    value = example(base)
    items = _as_tuple(index, value.dim()) if value is not None else None
    if items is None or value is None:
        return None
    rows = [(dim, at) for dim, at in enumerate(items) if isinstance(at, int)]
    if len(rows) != 1 or any(item != slice(None) for item in items if isinstance(item, slice)):
        return None
    dim, at = rows[0]
    return base, dim, at % value.shape[dim], row


def _forward_read(node: fx.Node) -> None:
    """A read of a row that was written before reads the written value instead."""
    if node.target is not torch.select or node.op != "call_function":
        return
    base, dim, at = node.args
    while (write := _row_write(base)) is not None and write[1] == dim and write[2] != at:
        base = write[0]
    if write is not None and write[1] == dim and isinstance(write[3], fx.Node):
        row, read = example(write[3]), example(node)
        if row is not None and read is not None and row.shape == read.shape and row.dtype == read.dtype:
            node.replace_all_uses_with(write[3])
            return
    node.args = (base, dim, at)


def put_rows(base: torch.Tensor, dim: int, indices: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
    """``base`` with ``rows[i]`` (stacked along ``dim``) written at ``indices[i]`` of dimension ``dim``."""
    return base.index_copy(dim, torch.tensor(indices, device=base.device), rows)


def _collect_rows(graph: fx.Graph, node: fx.Node) -> None:
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
    _replace(node, stacked)


def _shaped(graph: fx.Graph, row: Any, slot: torch.Tensor, write: fx.Node) -> fx.Node:
    """A written value with the shape and dtype of the row that it fills."""
    value = example(row)
    with graph.inserting_before(write):
        if not isinstance(row, fx.Node):
            row = graph.call_function(
                torch.full, (tuple(slot.shape), row), {"dtype": slot.dtype, "device": slot.device}
            )
            row.meta["example_value"] = slot
            return row
        if value is None or value.dtype != slot.dtype:
            row = graph.call_method("to", (row, slot.dtype))
            row.meta["example_value"] = None if value is None else value.to(slot.dtype)
        if value is None or value.shape != slot.shape:
            row = graph.call_method("expand", (row, tuple(slot.shape)))
            row.meta["example_value"] = slot
    return row


def _collect_cat(graph: fx.Graph, node: fx.Node) -> None:
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
        _replace(node, flat)


def _cat(node: Any) -> tuple[list[Any], int]:
    if not isinstance(node, fx.Node) or node.target is not torch.cat or node.op != "call_function" or not node.args:
        return [], 0
    value = example(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if value is None or not isinstance(dim, int) or not isinstance(node.args[0], list | tuple):
        return [], 0
    return list(node.args[0]), dim % value.dim()


def _sink_selects(graph: fx.Graph) -> None:
    """Every user gets a select of its own, right before it: a step then holds its own slice of time."""
    for node in reversed(list(graph.nodes)):
        if node.target is not torch.select or node.op != "call_function":
            continue
        for user in list(node.users):
            if user.op != "output":
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
        if not node.users:
            graph.erase_node(node)
