"""Captures of one model at several short lengths as one template: the same nodes, with numbers that may vary.

The outer graphs must have the same nodes in the same order. Where numbers differ between the lengths, the template
holds all of them (``Varies``); three and more rows of one stacked output that follow each other in a list are one
``RowRun``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from reroll.capture.lengths.lift import lift
from reroll.capture.lengths.sized import shapes_of
from reroll.capture.lengths.template import ADVICE, LoopTemplate, Progression, RowRun, Sized, Template, Varies
from reroll.errors import LengthError
from reroll.graph.editing import content_of
from reroll.graph.effects import attribute
from reroll.graph.lines import where
from reroll.recurrence import Capture, Items, Numbers, PerStep, Recurrence, Slices

_RUN = 3


class NeverError(LengthError):
    """Operations that cannot be rolled, at no number of steps."""


class TransformError(NeverError):
    """A ``torch.func`` transform in what Dynamo has traced; models may do without it where they are not traced."""


def align(lengths: Sequence[int], modules: Sequence[fx.GraphModule], found: Sequence[Capture]) -> Template:
    """The template of captures of ``modules`` at ``lengths``, shortest first. Raises LengthError."""
    for length, each in zip(lengths, found, strict=True):
        if not each.recurrences:
            kind = TransformError if each.transformed else NeverError if each.refused else LengthError
            more = " Without time_dim it rolls blocks over depth." if kind is LengthError else ""
            raise kind(f"reroll.compile found no recurrence in a trace of {length} steps: {each.reason}.{more}")
    graphs = [each.outer for each in found]
    kept = [_without_rows(graph) for graph in graphs]
    walk = _Walk(lengths, modules)
    walk.graphs(kept)
    loops = zip(*(each.recurrences for each in found), strict=False)
    if len({len(each.recurrences) for each in found}) > 1:
        counts = ", ".join(str(len(each.recurrences)) for each in found)
        raise LengthError(f"Traces of {walk.spelled} steps hold {counts} loops. {ADVICE}")
    made = tuple(_loop(lengths, each) for each in loops)
    _refuse_other_dimensions(made)
    return Template(tuple(lengths), tuple(walk.merged), made)


def _refuse_other_dimensions(loops: Sequence[LoopTemplate]) -> None:
    """Raise LengthError where what was taken for time is another dimension: sizes vary, and no number of steps does."""
    sized = [each.recurrence for each in loops if each.sized]
    if sized and not any(isinstance(each.steps, Varies) for each in loops):
        raise LengthError(
            f"Every step of the loop at {sized[0].where} reads a value whose size depends on the length of what "
            "time_dim names, and no loop has as many steps as that. If it is no dimension of time, say in time_dim "
            f"which is. {ADVICE}"
        )


class _Walk:
    """Merges graphs node by node."""

    def __init__(self, lengths: Sequence[int], modules: Sequence[torch.nn.Module]) -> None:
        self.lengths, self.modules = lengths, modules
        self.places: list[dict[fx.Node, int]] = [{} for _ in lengths]
        self.merged: list[tuple[fx.Node, Any, Any]] = []

    @property
    def spelled(self) -> str:
        return ", ".join(map(str, self.lengths))

    def graphs(self, nodes: Sequence[list[fx.Node]]) -> None:
        """Merge lists of nodes: all must have the same operations in the same order."""
        for at, each in enumerate(zip(*nodes, strict=False)):
            last = each[-1]
            if len({self._operation(node, module) for node, module in zip(each, self.modules, strict=True)}) > 1:
                raise LengthError(f"Traces of {self.spelled} steps differ at {where(last)}. {ADVICE}")
            args = self._merge_items([n.args for n in each], [n.args for n in each], last)
            self.merged.append((last, args, self.merge([n.kwargs for n in each], last)))
            for places, node in zip(self.places, each, strict=True):
                places[node] = at
        if len({len(each) for each in nodes}) > 1:
            shortest = min(len(each) for each in nodes)
            line = where(next(each[shortest] for each in nodes if len(each) > shortest))
            raise LengthError(f"Traces of {self.spelled} steps differ from {line} on. {ADVICE}")

    def _operation(self, node: fx.Node, module: torch.nn.Module) -> Any:
        if node.op == "get_attr":
            return node.op, content_of(attribute(module, node))
        return node.op, None if node.op == "placeholder" else node.target

    def merge(self, values: Sequence[Any], node: fx.Node) -> Any:
        """One operand of all graphs."""
        first, kinds = values[-1], {type(value) for value in values}
        if isinstance(first, fx.Node):
            places = {p.get(v) if isinstance(v, fx.Node) else None for p, v in zip(self.places, values, strict=True)}
            if len(places) == 1 and None not in places:
                return first
        elif isinstance(first, list | tuple) and all(isinstance(value, list | tuple) for value in values):
            return self._merge_items([list(_runs(value)) for value in values], values, node)
        elif isinstance(first, dict) and all(list(value) == list(first) for value in values):
            return {key: self.merge([value[key] for value in values], node) for key in first}
        elif isinstance(first, slice) and len(kinds) == 1:
            parts = [self.merge([getattr(v, name) for v in values], node) for name in ("start", "stop", "step")]
            return slice(*parts)
        elif isinstance(first, RowRun) and len(kinds) == 1:
            names = ("rows", "start", "stride", "count")
            return RowRun(*(self.merge([getattr(v, name) for v in values], node) for name in names))
        elif type(first) in (int, float) and len(kinds) == 1:
            return first if len(set(values)) == 1 else Varies(tuple(values))
        elif all(value == first for value in values):
            return first
        raise LengthError(f"Traces of {self.spelled} steps have other operands at {where(node)}. {ADVICE}")

    def _merge_items(self, items: Sequence[Sequence[Any]], values: Sequence[Any], node: fx.Node) -> Any:
        """Lists item by item; ``items`` of each are its values, with the runs of rows among them if it may have such.

        The operands of a node itself may not: a run takes one place, and they have one each.
        """
        if len({len(each) for each in items}) == 1:
            merged = [self.merge(each, node) for each in zip(*items, strict=True)]
            return type(values[-1])(merged) if not isinstance(values[-1], torch.Size) else tuple(merged)
        found = [_progression(value) for value in values]
        if any(each is None for each in found):
            raise LengthError(
                f"The list at {where(node)} does not grow evenly: it has {', '.join(str(len(v)) for v in values)} "
                f"items at {self.spelled} steps. {ADVICE}"
            )
        return Progression(*(self.merge([each[i] for each in found if each], node) for i in range(3)))


def _progression(values: Any) -> tuple[int, int, int] | None:
    if len(values) < 2 or not all(type(value) is int for value in values):
        return None
    stride = values[1] - values[0]
    even = all(b - a == stride for a, b in pairwise(values))
    return (values[0], stride, len(values)) if even else None


def row_of(node: Any) -> tuple[fx.Node, int] | None:
    """(unbound stacked output, index) of a node that is one row of it."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.op != "call_function":
        return None
    base, index = node.args
    unbound = isinstance(base, fx.Node) and base.op == "call_function" and base.target is torch.unbind
    return (base, index) if unbound and isinstance(index, int) else None  # type: ignore[return-value]


def _runs(items: Sequence[Any]) -> Iterator[Any]:
    """The items of a list, with three and more rows that follow each other evenly as one ``RowRun``."""
    rows = [row_of(item) for item in items]
    at = 0
    while at < len(items):
        first, stop = rows[at], at + 1
        if first is not None and stop < len(items) and (second := rows[stop]) is not None and second[0] is first[0]:
            stride = second[1] - first[1]
            while stop < len(items) and rows[stop] == (first[0], first[1] + stride * (stop - at)):
                stop += 1
            if stop - at >= _RUN and stride:
                yield RowRun(first[0], first[1], stride, stop - at)
                at = stop
                continue
        yield items[at]
        at += 1


def _without_rows(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph without the rows that are only read in runs."""
    read: set[fx.Node] = set()

    def note(value: Any) -> None:
        if isinstance(value, fx.Node):
            read.add(value)
        elif isinstance(value, list | tuple):
            for item in _runs(value):
                note(item)
        elif isinstance(value, dict):
            for item in value.values():
                note(item)

    for node in graph.nodes:
        for operand in (*node.args, *node.kwargs.values()):
            note(operand)
    return [node for node in graph.nodes if row_of(node) is None or node in read]


def _loop(lengths: Sequence[int], found: tuple[Recurrence, ...]) -> LoopTemplate:
    """The template of one recurrence."""
    alike = len({each.peeled for each in found}) == 1
    last = found[-1] if alike else replace(found[-1], peeled=())
    kinds = {
        (r.name, len(r.carries), r.constants, r.kept_rows, r.autocast, r.grad_enabled, r.random, len(r.xs), r.operands)
        for r in found
    }
    if len(kinds) > 1:
        raise LengthError(f"The loop at {last.where} differs at {', '.join(map(str, lengths))} steps. {ADVICE}")
    walk = _Walk(lengths, [each.step for each in found])
    walk.graphs([list(each.step.graph.nodes) for each in found])
    xs = tuple(_per_step(each, last) for each in zip(*(r.xs for r in found), strict=True))
    counts = tuple(each.steps for each in found)
    steps = counts[0] if len(set(counts)) == 1 else Varies(counts)
    if (shapes := shapes_of(found)) is not None:
        return LoopTemplate(last, steps, xs, Sized(tuple(walk.merged), shapes))
    recurrence, lifted = lift(last, walk.merged)
    return LoopTemplate(recurrence, steps, (*xs, *lifted))


def _per_step(xs: tuple[PerStep, ...], recurrence: Recurrence) -> PerStep:
    """One per-step input of all lengths."""
    last = xs[-1]
    if isinstance(last, Slices) and all(isinstance(x, Slices) for x in xs):
        fixed = {(x.operand, x.dim, x.stride) for x in xs if isinstance(x, Slices)}
        starts = tuple(x.start for x in xs if isinstance(x, Slices))
        if len(fixed) == 1:
            start: Any = starts[0] if len(set(starts)) == 1 else Varies(starts)
            return Slices(last.operand, last.dim, start, last.stride)
    if isinstance(last, Items) and all(x == last for x in xs):
        return last
    if isinstance(last, Numbers) and all(isinstance(x, Numbers) for x in xs):
        values: Any = tuple(x.values for x in xs if isinstance(x, Numbers))
        return Numbers(values)
    raise LengthError(
        f"What the steps of the loop at {recurrence.where} read one after another does not grow evenly with the number "
        f"of steps. {ADVICE}"
    )
