"""Which dimensions of a state the dimensions of a value are, through views.

``Axes`` has for each dimension of a value the dimensions of the state that it runs over, in order: one as a rule,
several where a view has joined them, none where the value has one entry there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import fx

from reroll.graph.editing import aten

Axes = tuple[tuple[int, ...], ...]

_RESHAPED = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
}
_SAME = {aten.clone.default, aten.alias.default, aten.contiguous.default}
_TURNED = {aten.permute.default, aten.transpose.int, aten.t.default}


def own(sizes: Sequence[int]) -> Axes:
    """Those of the state itself."""
    return tuple((at,) if size != 1 else () for at, size in enumerate(sizes))


def broadcast(shape: Sequence[int], axes: Axes) -> Axes:
    """Those of a value of a shape that meets, in a pointwise operation, one that has ``axes``."""
    return tuple(group if size != 1 else () for size, group in zip(shape, axes[len(axes) - len(shape) :], strict=True))


def is_view(node: fx.Node) -> bool:
    """Whether an operation gives the values of its operand, laid out otherwise."""
    return node.target in _RESHAPED | _SAME | _TURNED or node.target is aten.expand.default


def of_view(node: fx.Node, axes: Axes, sizes: Sequence[int]) -> Axes | None:
    """Those of the result of a view of a value that has ``axes``; None where they cannot be told."""
    target: Any = node.target
    if target in _SAME:
        return axes
    if target in _TURNED:
        return tuple(axes[at] for at in _order(node))
    shape = node.meta["val"].shape
    if target in _RESHAPED:
        return _split(axes, shape, sizes)
    before = tuple(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    kept = (1,) * (len(shape) - len(before)) + before
    return ((),) * (len(shape) - len(before)) + axes if kept == tuple(shape) else None


def of_viewed(node: fx.Node, axes: Axes, sizes: Sequence[int]) -> Axes | None:
    """Those of the operand of a view whose result has ``axes``; None where they cannot be told."""
    target: Any = node.target
    shape: Sequence[int] = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    if target in _SAME:
        return axes
    if target in _TURNED:
        order = _order(node)
        return tuple(axes[order.index(at)] for at in range(len(order)))
    return _split(axes, shape, sizes) if target in _RESHAPED else broadcast(shape, axes)


def _order(node: fx.Node) -> list[int]:
    count = len(node.meta["val"].shape)
    order = list(range(count))
    if node.target is aten.permute.default:
        given: Any = node.args[1]
        return [at % count for at in given]
    swapped: Any = (0, count - 1) if node.target is aten.t.default else node.args[1:3]
    first, second = (at % count for at in swapped)
    order[first], order[second] = second, first
    return order


def _split(axes: Axes, shape: Sequence[int], sizes: Sequence[int]) -> Axes | None:
    """The dimensions of the state in the same order, shared out among those of a shape."""
    left, found = [at for group in axes for at in group], list[tuple[int, ...]]()
    for size in shape:
        group: tuple[int, ...] = ()
        while left and prod(sizes[at] for at in group) < size:
            group += (left.pop(0),)
        if prod(sizes[at] for at in group) != size:
            return None
        found.append(group)
    return None if left else tuple(found)
