"""The graph around the recurrences: copied from the captured one, with stacked outputs taken whole where possible."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from reroll.effects import example


@dataclass
class Outer:
    """The graph around the recurrences while it is built, and where values of the old graph are found in it."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    emitted: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    unbound: dict[fx.Node, fx.Node] = field(default_factory=dict)
    repeated: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def value(self, old: fx.Node) -> fx.Node:
        """The new node of an old one; one step's output is taken from the stacked outputs.

        ``repeated`` says which loop-invariant value of the first step a later step's equals.
        """
        old = self.repeated.get(old, old)
        if old not in self.env and old in self.emitted:
            self.env[old] = self._row(old)
        return self.env[old]

    def _row(self, old: fx.Node) -> fx.Node:
        """One step's output, taken right behind the recurrence: in the gradient mode of the loop, not of its reader."""
        stacked, at = self.emitted[old]
        if stacked not in self.unbound:
            with self.graph.inserting_after(stacked):
                self.unbound[stacked] = self.graph.call_function(torch.unbind, (stacked, 0))
        with self.graph.inserting_after(self.unbound[stacked]):
            row = self.graph.call_function(operator.getitem, (self.unbound[stacked], at))
        row.meta["example_value"] = example(old)
        return row

    def hoist(self, old: fx.Node) -> fx.Node:
        """The new node of a constant; loop-invariant work is done once, before the loop."""
        old = self.repeated.get(old, old)
        if old not in self.env and old not in self.emitted:
            for node in old.all_input_nodes:
                self.hoist(node)
            self.env[old] = self.graph.node_copy(old, self.value)
        return self.value(old)

    def copy(self, old: fx.Node) -> None:
        """Copy an old node; a stack or cat of stacked outputs takes them whole."""
        if old.op == "call_function" and old.target in (torch.stack, torch.cat):
            gathered = self._gather(old)
            if gathered is not None:
                self.env[old] = gathered
                gathered.meta = dict(old.meta)
                return
        self.env[old] = self.graph.node_copy(old, self.value)

    def run_of(self, olds: Iterable[fx.Node]) -> tuple[fx.Node, int, int] | None:
        """(stacked outputs, start, stride) if the nodes are outputs of steps that move evenly."""
        places = [self.emitted.get(old) for old in olds]
        first, last = places[0], places[-1]
        if first is None or last is None or len(places) < 2:
            return None
        stride, rest = divmod(last[1] - first[1], len(places) - 1)
        even = all(p is not None and p[0] is first[0] and p[1] == first[1] + i * stride for i, p in enumerate(places))
        return (first[0], first[1], stride) if even and rest == 0 and stride != 0 else None

    def _gather(self, old: fx.Node) -> fx.Node | None:
        items = old.args[0]
        dim = old.args[1] if len(old.args) > 1 else old.kwargs.get("dim", 0)
        if not isinstance(items, list | tuple) or not isinstance(dim, int) or set(old.kwargs) - {"dim"}:
            return None
        if not all(isinstance(item, fx.Node) for item in items):
            return None
        groups = list(self._groups(list(items)))
        value = example(old)
        if all(len(group) == 1 for group in groups) or value is None:
            return None
        dim %= value.dim()
        pieces = [self._piece(group, dim, old.target is torch.stack) for group in groups]
        return pieces[0] if len(pieces) == 1 else self.graph.call_function(torch.cat, (pieces, dim))

    def stacked(self, olds: Iterable[fx.Node]) -> fx.Node | None:
        """Nodes stacked along a new first dimension, if some are rows that follow each other evenly."""
        nodes = list(olds)
        groups = list(self._groups(nodes))
        if all(len(group) == 1 for group in groups):
            return None
        for old in (group[0] for group in groups if len(group) == 1):
            self.hoist(old)
        pieces = [self._piece(group, 0, True) for group in groups]
        made = pieces[0] if len(pieces) == 1 else self.graph.call_function(torch.cat, (pieces, 0))
        row, count = example(groups[0][0]), sum(map(len, groups))
        if row is not None:
            needs = any(value is not None and value.requires_grad for value in map(example, nodes))
            made.meta["example_value"] = row.new_empty((count, *row.shape)).requires_grad_(needs)
        return made

    def _groups(self, items: list[Any]) -> Iterable[list[fx.Node]]:
        group: list[fx.Node] = []
        for item in items:
            if group and self._even([*group[-2:], item]):
                group.append(item)
                continue
            yield from self._whole(group)
            group = [item]
        yield from self._whole(group)

    def _whole(self, group: list[fx.Node]) -> list[list[fx.Node]]:
        """A group as one; two rows that are no neighbours by themselves."""
        far = len(group) == 2 and abs(self.emitted[group[0]][1] - self.emitted[group[1]][1]) > 1
        return [[item] for item in group] if far else [group] if group else []

    def _even(self, items: list[fx.Node]) -> bool:
        """Whether two or three nodes are rows of one stacked output that follow each other evenly."""
        places = [self.emitted.get(item) for item in items]
        rows = [place[1] for place in places if place is not None and places[0] and place[0] is places[0][0]]
        steps = {b - a for a, b in pairwise(rows)}
        return len(rows) == len(items) and len(steps) == 1 and 0 not in steps

    def _piece(self, group: list[fx.Node], dim: int, stack: bool) -> fx.Node:
        call, method = self.graph.call_function, self.graph.call_method
        if len(group) == 1:
            node = self.value(group[0])
            return call(torch.unsqueeze, (node, dim)) if stack else node
        stacked, first = self.emitted[group[0]]
        step = self.emitted[group[1]][1] - first
        if step < 0:
            stacked, first = call(torch.flip, (stacked, [0])), example(stacked).shape[0] - 1 - first  # type: ignore[union-attr]
        rows = example(self.emitted[group[0]][0])
        if abs(step) > 1:
            stacked = call(operator.getitem, (stacked, slice(first, first + abs(step) * len(group), abs(step))))
        elif rows is None or rows.shape[0] != len(group):
            stacked = call(torch.narrow, (stacked, 0, first, len(group)))
        if dim:
            stacked = method("contiguous", (call(torch.movedim, (stacked, 0, dim)),))
        return stacked if stack else call(torch.flatten, (stacked, dim, dim + 1))
