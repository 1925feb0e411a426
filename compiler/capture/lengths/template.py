"""A model at every number of steps: nodes and loops with numbers that depend on the length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from reroll.recurrence import PerStep, Recurrence

ADVICE = "Use torch.compile(backend='reroll') for this model, which compiles each length by itself."


@dataclass(frozen=True, slots=True)
class Varies:
    """A number that differs between the lengths: its value at each of them."""

    values: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Progression:
    """Whole numbers ``first, first + stride, ...``, ``count`` of them."""

    first: Any
    stride: Any
    count: Any


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows ``start, start + stride, ...`` of a stacked output that was unbound, ``count`` of them."""

    rows: fx.Node
    start: Any
    stride: Any
    count: Any


@dataclass(frozen=True, slots=True, eq=False)
class LoopTemplate:
    """A recurrence at every length: its step with numbers that depend on the length as per-step inputs.

    ``steps`` and the numbers of ``xs`` may vary; the ``values`` of each ``Numbers`` are those of each length.
    ``sized``: where sizes of what the step is given vary, it is another one at each length.
    """

    recurrence: Recurrence
    steps: Any
    xs: tuple[PerStep, ...]
    sized: Sized | None = None


@dataclass(frozen=True, slots=True)
class Sized:
    """A step at every length: its nodes with their operands, and the shapes of the recurrence's operands."""

    nodes: tuple[tuple[fx.Node, Any, Any], ...]
    shapes: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The outer graph's nodes with their operands, and the recurrences, at every length."""

    lengths: tuple[int, ...]
    nodes: tuple[tuple[fx.Node, Any, Any], ...]
    loops: tuple[LoopTemplate, ...]
