"""The numbers in a graph, apart from its structure: two graphs of one structure differ in numbers alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import fx

from reroll.graph.private import is_overload
from reroll.segment.ops import PACKED_EVENTS, PACKED_PRODUCT

Numbers = tuple[int | float, ...]
_PLAIN = (float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MARKS = ("inductor_realize_to_strides",)
_UNSEEN = ("eager_input_vals", "arg_kwarg_vals")  # layouts that an operation is to be given


@dataclass(frozen=True, slots=True)
class Numbered:
    """A graph as its ``structure`` and its ``numbers``: sizes and strides of its operands, then the numbers among the
    arguments of its nodes, each in order. ``sizes``: which of them are sizes of operands."""

    structure: Hashable
    numbers: Numbers
    sizes: tuple[int, ...]


def numbered(graph: fx.Graph) -> Numbered | None:
    """The structure and the numbers of a graph of ATen operations on tensors; None where it has anything else."""
    reader = _Reader({node: at for at, node in enumerate(graph.nodes)})
    try:
        structure = tuple(map(reader.node, graph.nodes))
    except _UnknownError:
        return None
    return Numbered(structure, tuple(reader.numbers), tuple(reader.sizes))


def is_number(value: Any) -> bool:
    """Whether a value counts as a number; a float of 0 is a part of the structure, as it has a sign."""
    if isinstance(value, float):
        return isfinite(value) and value != 0
    return isinstance(value, int) and not isinstance(value, bool)


def _widths(node: fx.Node) -> Hashable:
    """What a kernel of ours is written for: the shape of a packed weight, which is no size of a batch or a length."""
    if node.target not in (PACKED_PRODUCT, PACKED_EVENTS):
        return None
    rows: Any = node.args[0]
    return rows.meta["val"].shape[1], node.meta["val"].shape[1]


class _UnknownError(Exception):
    """What is read is of no known kind."""


@dataclass(slots=True)
class _Reader:
    places: dict[fx.Node, int]
    numbers: list[int | float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def node(self, node: fx.Node) -> Hashable:
        """The structure of a node; its numbers are noted."""
        if node.op == "placeholder":
            return node.name, *self._operand(node.meta["val"])  # by its name the wrapper has it
        if node.op not in ("call_function", "output") or any(name in node.meta for name in _UNSEEN):
            raise _UnknownError
        target: Any = node.target
        if node.op == "call_function" and not is_overload(target) and target.__module__ != "_operator":
            raise _UnknownError
        marks = tuple(bool(node.meta.get(name)) for name in _MARKS)
        return node.op, target, self._value(node.args), self._value(node.kwargs), marks, _widths(node)

    def _operand(self, value: Any) -> tuple[Hashable, ...]:
        if type(value).__name__ not in ("FakeTensor", "Tensor") or value.layout is not torch.strided:
            raise _UnknownError
        self.sizes += range(len(self.numbers), len(self.numbers) + value.dim())
        self.numbers += [*value.shape, *value.stride()]
        return value.dtype, str(value.device), value.dim()

    def _value(self, value: Any) -> Hashable:
        match value:
            case fx.Node():
                return fx.Node, self.places[value]
            case bool():
                return value
            case int() | float() if is_number(value):
                self.numbers.append(value)
                return type(value).__name__
            case list() | tuple():
                return type(value), *map(self._value, value)
            case dict():
                return dict, *((key, self._value(each)) for key, each in value.items())
            case slice():
                return slice, *map(self._value, (value.start, value.stop, value.step))
        if not isinstance(value, _PLAIN):
            raise _UnknownError
        return type(value), repr(value)
