"""Which operations behind a loop are sums over its steps, so that each step can give its part of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from reroll.capture.rows.peel import RowEmitter
from reroll.capture.rows.row_rules import Rows, argument, shape
from reroll.graph.effects import example, is_torchs, spelled

_POINTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_OF_CLASSES = ("cross_entropy", "nll_loss")
_HALF = (torch.float16, torch.bfloat16)
_OLD = ("size_average", "reduce")  # arguments that torch has replaced by ``reduction``
Ended = Callable[[fx.Graph, fx.Node], list[fx.Node]]


def _as_it_is(_: fx.Graph, __: fx.Node) -> list[fx.Node]:
    return []


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over the rows of a loop.

    ``operands`` are those with a row for each step: (their time dimension, entries of a row) for those that the loop
    does not make. ``kwargs``: the arguments with which ``node`` would be a sum. ``ended`` gives the operations that
    make ``node`` of the whole sum, the last one last, such as a division.
    """

    node: fx.Node
    rows: Rows
    value: torch.Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    spread: Mapping[fx.Node, tuple[int, int]] = field(default_factory=dict)
    target: Any = torch.sum
    ended: Ended = _as_it_is

    @property
    def part(self) -> torch.dtype:
        """In which a step gives its part: one row in half precision may be more than that holds."""
        return torch.float32 if self.value.dtype in _HALF else self.value.dtype

    @property
    def dtype(self) -> torch.dtype:
        """In which the sum is carried."""
        return torch.float64 if self.value.dtype.is_floating_point else self.value.dtype

    def of_row(self, emitter: RowEmitter, r: int) -> fx.Node:
        """The part of row r."""

        def operand(node: fx.Node) -> fx.Node:
            if node in emitter.rows:
                return emitter.emit(node, r)
            return (
                emitter.spread(node, self.spread[node][0], r, self.spread[node][1])
                if node in self.spread
                else (emitter.constant(node))
            )

        args, kwargs = fx.map_arg(self.args, operand), fx.map_arg(dict(self.kwargs), operand)
        return emitter.graph.call_function(self.target, args, kwargs)


def total_of(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Total | None:
    """What a node adds up over all rows of the values in ``rows``; None if it is no such sum."""
    value = example(node)
    if node in rows or value is None or value.dtype.is_complex or not is_torchs(node):
        return None
    if not any(each in rows for each in node.all_input_nodes):
        return None
    name = spelled(node)
    if name in ("sum", "mean"):
        return _reduction(node, rows, value, name)
    if name in (*_POINTWISE, *_BINARY, *_OF_CLASSES) and node.target is getattr(functional, name, None):
        return _loss(node, rows, value, name)
    return None


def _reduction(node: fx.Node, rows: Mapping[fx.Node, Rows], value: torch.Tensor, name: str) -> Total | None:
    source: Any = node.args[0] if node.args else None
    given, found = example(source) if isinstance(source, fx.Node) else None, rows.get(source)
    if given is None or found is None or not {*node.kwargs} <= {"dim", "keepdim"} or len(node.args) > 3:
        return None
    dims = argument(node, 1, "dim")
    listed = [dims] if isinstance(dims, int) else [*(dims or range(given.dim()))]
    if not all(type(each) is int for each in listed) or found.dim not in [each % given.dim() for each in listed]:
        return None
    kwargs: dict[str, Any] = {"dim": listed, "keepdim": bool(argument(node, 2, "keepdim", False))}
    kwargs |= {"dtype": torch.float32} if value.dtype in _HALF else {}
    count = given.numel() // max(value.numel(), 1)
    if not given.numel():
        return None
    return Total(node, found, value, (source,), kwargs, ended=_divided(count) if name == "mean" else _as_it_is)


def _divided(count: int) -> Ended:
    return lambda graph, total: [graph.call_function(torch.div, (total, count))]


def _loss(node: fx.Node, rows: Mapping[fx.Node, Rows], value: torch.Tensor, name: str) -> Total | None:
    """A loss whose mean or sum is taken over all entries, or all rows, of its first operand."""
    bound = inspect.signature(getattr(functional, name)).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    source, target = given["input"], given["target"]
    found, reduction = rows.get(source), given["reduction"]
    if (
        found is None
        or reduction not in ("mean", "sum")
        or value.dtype in _HALF
        or any(given.get(each) is not None for each in _OLD)
    ):
        return None
    if not _plainly_weighted(given, name, rows) or example(target) is None:
        return None
    along = _along(found, shape(source), shape(target), name)
    if along is None:
        return None
    if target in rows and not _alike(rows[target], found, along):
        return None
    kwargs = {name: each for name, each in given.items() if name not in _OLD} | {"reduction": "sum"}
    spread = {} if target in rows else {target: (along, found.inner)}
    ended = _mean(source, target, given, name) if reduction == "mean" else _as_it_is
    return Total(node, found, value, (), kwargs, spread, getattr(functional, name), ended)


def _plainly_weighted(given: Mapping[str, Any], name: str, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether a loss has no weights, or constant ones of classes, which are then told by their numbers alone."""
    weight = given.get("weight")
    if given.get("pos_weight") is not None or weight is None:
        return given.get("pos_weight") is None
    value, classes = example(weight), shape(given["input"]) != shape(given["target"])
    plain = name in _OF_CLASSES and classes and not given.get("label_smoothing")
    return plain and value is not None and weight not in rows and not value.requires_grad


def _along(found: Rows, source: Sequence[int], target: Sequence[int], name: str) -> int | None:
    """Which dimension of the targets is time; None where their shapes are others than those of one step's."""
    if source == target:
        classes = name in _OF_CLASSES  # probabilities of them, in dimension 1
        return None if classes and (found.dim == 1 or len(source) < 2) else found.dim
    fits = name in _OF_CLASSES and len(source) > 1 and target == (source[0], *source[2:])
    return (found.dim and found.dim - 1) if fits and found.dim != 1 else None


def _alike(target: Rows, source: Rows, along: int) -> bool:
    same = ("inner", "length", "shift", "first", "last")
    return target.dim == along and all(getattr(target, each) == getattr(source, each) for each in same)


def _mean(source: fx.Node, target: fx.Node, given: Mapping[str, Any], name: str) -> Ended:
    """Division by the number of entries, or of classes that count."""
    sizes = shape(source)
    if name not in _OF_CLASSES:
        return _divided(math.prod(sizes))
    if sizes == shape(target):
        return _divided(math.prod(sizes) // sizes[1])

    def ended(graph: fx.Graph, total: fx.Node) -> list[fx.Node]:
        """By how many targets count, or by the sum of their weights."""
        value, weight = example(target), given.get("weight")
        assert value is not None
        counts = graph.call_function(torch.ne, (target, given["ignore_index"]))
        counts.meta["example_value"] = value.new_empty(value.shape, dtype=torch.bool)
        made, dtype = [counts], torch.int64
        if weight is not None:
            dtype = torch.float64
            made += [
                graph.call_function(torch.mul, (target, counts)),
                graph.call_method("to", (weight, dtype)),
            ]
            made.append(graph.call_function(torch.take, (made[2], made[1])))
            made.append(graph.call_function(torch.mul, (made[3], counts)))
            shapes = (value.shape, shape(weight), value.shape, value.shape)
            for node, size, kind in zip(made[1:], shapes, (value.dtype, dtype, dtype, dtype), strict=True):
                node.meta["example_value"] = value.new_empty(size, dtype=kind)
        number = graph.call_function(torch.sum, (made[-1],))
        number.meta["example_value"] = value.new_empty((), dtype=dtype)
        return [*made, number, graph.call_function(torch.div, (total, number))]

    return ended
