"""The order in which dimensions lie in memory, operations that give a value another one, and whose memory it is."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.graph.effects import example, is_random, operation, spelled
from reroll.graph.inplace import out_of_place

_TELLS = ("view", "view_as", "as_strided", "stride", "is_contiguous", "contiguous", "ravel", "unflatten", "unfold")
Order = tuple[int, ...]
"""Dimensions as they lie in memory, that of the largest stride first."""


def memory_order(value: torch.Tensor) -> Order:
    """The order of a tensor's dimensions; those of one entry, and expanded ones, stay where they are."""
    strides = value.stride()
    dims = [dim for dim, (size, step) in enumerate(zip(value.shape, strides, strict=True)) if size > 1 and step]
    moved = iter(sorted(dims, key=lambda dim: -strides[dim]))
    return tuple(next(moved) if dim in dims else dim for dim in range(value.dim()))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes one."""
    return sorted(range(len(order)), key=order.__getitem__)


def is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected and value.numel():
            return False
        expected *= size
    return value.numel() > 0 or value.is_contiguous()


def is_plain(order: Order) -> bool:
    """Whether it is that of contiguous memory."""
    return order == tuple(range(len(order)))


def lay_out(graph: fx.Graph, node: fx.Node, order: Order) -> fx.Node:
    """Operations at the point of insertion that give a node's value an order of memory."""
    value = node.meta.get("example_value")
    back = inverse(order)
    for method, *args in (("permute", order), ("contiguous",), ("permute", tuple(back))):
        node = graph.call_method(method, (node, *args))
        if value is not None:
            value = getattr(value, method)(*args)
            node.meta["example_value"] = value
    return node


def shows(node: fx.Node, apart: Container[fx.Node] = ()) -> bool:
    """Whether the layout of a node's value shows in a result of the graph, or makes an operation fail.

    apart: readers of the node that are done away with.
    """
    todo, seen = [user for user in node.users if user not in apart], set[fx.Node]()
    while todo:
        user = todo.pop()
        if user in seen:
            continue
        seen.add(user)
        name = spelled(user).split(".")[0]
        if user.op in ("output", "call_module") or user.target is out_of_place:
            return True
        if name in _TELLS or name.endswith("_like") or is_random(user):
            return True
        value = example(user)
        if value is None or value.numel() > 1:
            todo += user.users
    return False


@dataclass(frozen=True, slots=True)
class Laid:
    """Whose ``memory`` a value may be: a call's, or that of one of its results. ``rows``: the call of ``torch.unbind``
    that gives the row of it that the value is, or looks at; ``number``: which one, or a slice of several."""

    memory: tuple[fx.Node, Any]
    rows: fx.Node | None = None
    number: Any = None


def laid_in(node: fx.Node) -> Laid:
    """Where the result of a node of torch's operations lies."""
    row: tuple[fx.Node | None, Any] = (None, None)
    while True:
        source, name = node.args[0] if node.args else None, spelled(node)
        if node.op not in ("call_function", "call_method") or not isinstance(source, fx.Node):
            return Laid((node, None), *row)
        if node.target is operator.getitem and operation(source).view != "pieces" and _of_several(source):
            return Laid((source, node.args[1]), *row)
        if node.target is operator.getitem and source.target is torch.unbind and not any(source.args[1:]):
            row = source, node.args[1]
        in_place = name.endswith("_") and not name.endswith("__")
        if not (operation(node).view or operation(node).moves == "same" or in_place):
            return Laid((node, None), *row)
        node = source


def _of_several(node: fx.Node) -> bool:
    """Whether a node gives several tensors."""
    return node.op == "call_module" or isinstance(node.meta.get("example_value"), tuple | list)
