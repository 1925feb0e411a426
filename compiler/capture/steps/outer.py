"""The graph around the recurrences: copied from the captured one, with stacked outputs taken whole where possible."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from reroll.capture.folded import Gapped
from reroll.capture.steps.runs import Item, longest, slopes
from reroll.graph.effects import example
from reroll.graph.fakes import contiguous
from reroll.graph.layouts import is_plain, lay_out, memory_order, shows
from reroll.graph.lines import take_line

COLLECTED = "collected"
"""Where a node made of rows of loops says how they are read: as ``ROWS``, each a value of the program's, so that a
gradient of one is none of another, or as a ``STACK``, one value there, too."""
ROWS, STACK = "rows", "stack"
Group = list[list[fx.Node]]
"""Columns of items, to be read row by row; several rows only where all follow each other evenly."""


@dataclass
class Outer:
    """The graph around the recurrences while it is built, and where values of the old graph are found in it."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    emitted: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    unbound: dict[fx.Node, fx.Node] = field(default_factory=dict)
    repeated: dict[fx.Node, fx.Node] = field(default_factory=dict)
    needing: dict[fx.Node, bool] = field(default_factory=dict)
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

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
        stacked, at = self._holding([old]), self.emitted[old][1]
        if stacked not in self.unbound:
            with self.graph.inserting_after(stacked):
                self.unbound[stacked] = self.graph.call_function(torch.unbind, (stacked, 0))
        with self.graph.inserting_after(self.unbound[stacked]):
            row = self.graph.call_function(operator.getitem, (self.unbound[stacked], at))
        row.meta["example_value"] = example(old)
        take_line(row, old)
        with self.graph.inserting_before(row.next):
            return self.as_it_lies(row)

    def _holding(self, olds: list[fx.Node]) -> fx.Node:
        """The stacked outputs that rows are of; without a gradient if none of these rows needs one, but others do."""
        stacked, _ = self.emitted[olds[0]]
        if any(map(_needs, olds)) or not self._some_need(stacked):
            return stacked
        if stacked not in self.detached:
            with self.graph.inserting_after(stacked):
                self.detached[stacked] = self.graph.call_method("detach", (stacked,))
            self.detached[stacked].meta["example_value"] = example(stacked).detach()  # type: ignore[union-attr]
            take_line(self.detached[stacked], olds[0])
        return self.detached[stacked]

    def _some_need(self, stacked: fx.Node) -> bool:
        """Whether a row of some step needs a gradient."""
        if stacked not in self.needing:
            self.needing[stacked] = any(_needs(old) for old, (whole, _) in self.emitted.items() if whole is stacked)
        return self.needing[stacked]

    def as_it_lies(self, given: fx.Node) -> fx.Node:
        """What a recurrence gives, which is contiguous, in the layout that its example has in the user's program."""
        value = example(given)
        if value is None:
            return given
        given.meta["example_value"] = contiguous(value)
        order = memory_order(value)
        if is_plain(order):
            return given
        made = lay_out(self.graph, given, order)
        take_line(made, given)
        return made

    def hoist(self, old: fx.Node) -> fx.Node:
        """The new node of a constant; loop-invariant work is done once, before the loop."""
        old = self.repeated.get(old, old)
        if old not in self.env and old not in self.emitted:
            for node in old.all_input_nodes:
                self.hoist(node)
            self.env[old] = self.graph.node_copy(old, self.value)
        return self.value(old)

    def take(self, row: fx.Node) -> None:
        """A row of a step that is missing is one of the step's outputs. Raises Gapped where it is none."""
        if row.users and row not in self.emitted and row not in self.repeated:
            raise Gapped

    def copy(self, old: fx.Node) -> None:
        """Copy an old node; a stack or cat of stacked outputs takes them whole."""
        if old.op == "call_function" and old.target in (torch.stack, torch.cat):
            gathered = self._gather(old)
            if gathered is not None:
                self.env[old] = gathered
                gathered.meta = {**old.meta, COLLECTED: STACK}
                return
        self.env[old] = self.graph.node_copy(old, self.value)

    def run_of(self, olds: Iterable[fx.Node], steps: Sequence[int] | None = None) -> tuple[fx.Node, int, int] | None:
        """(stacked outputs, start, stride) if the nodes, read at ``steps`` or at all, are outputs of steps that move
        evenly."""
        nodes = list(olds)
        steps = range(len(nodes)) if steps is None else steps
        places = [self.emitted.get(old) for old in nodes]
        first, last = places[0], places[-1]
        if first is None or last is None or len(places) < 2:
            return None
        stride, rest = divmod(last[1] - first[1], steps[-1])
        pairs = zip(steps, places, strict=True)
        even = all(p is not None and p[0] is first[0] and p[1] == first[1] + n * stride for n, p in pairs)
        return (self._holding(nodes), first[1], stride) if even and rest == 0 and stride != 0 else None

    def _gather(self, old: fx.Node) -> fx.Node | None:
        items = old.args[0] if old.args else old.kwargs.get("tensors")
        dim = old.args[1] if len(old.args) > 1 else old.kwargs.get("dim", 0)
        if not isinstance(items, list | tuple) or not isinstance(dim, int) or set(old.kwargs) - {"dim", "tensors"}:
            return None
        nodes = [item for item in items if isinstance(item, fx.Node)]
        if len(nodes) < len(items):
            return None
        groups = list(self._groups(nodes))
        value = example(old)
        if all(map(_single, groups)) or value is None:
            return None
        dim %= value.dim()
        pieces = [self._piece(group, dim, old.target is torch.stack) for group in groups]
        made = pieces[0] if len(pieces) == 1 else self.graph.call_function(torch.cat, (pieces, dim))
        return self._as_collected(made, old, nodes, dim)

    def _as_collected(self, made: fx.Node, old: fx.Node, rows: Iterable[fx.Node], dim: int) -> fx.Node:
        """Rows that were stacked in contiguous memory, and moved to ``dim``, in the layout that torch gives the user's
        stack or cat of them: where something can tell, if it is no contiguous one."""
        order = memory_order(example(old))  # type: ignore[arg-type]
        if not is_plain(order):
            return lay_out(self.graph, made, order) if shows(old) else made
        alike = all(is_plain(memory_order(value)) for value in map(example, rows) if value is not None)
        moved = dim > 0 and made.target is not torch.cat
        if not moved and made.target is not operator.getitem and alike:
            return made
        return self.graph.call_method("contiguous", (made,))

    def stacked(self, olds: Iterable[fx.Node]) -> fx.Node | None:
        """Nodes stacked along a new first dimension, if some are rows that follow each other evenly."""
        nodes = list(olds)
        groups = list(self._groups(nodes))
        if all(map(_single, groups)):
            return None
        for old in (group[0][0] for group in groups if _single(group)):
            self.hoist(old)
        pieces = [self._piece(group, 0, True) for group in groups]
        made = pieces[0] if len(pieces) == 1 else self._call(torch.cat, pieces, 0)
        row, count = example(nodes[0]), len(nodes)
        if row is not None:
            needs = any(map(_needs, nodes))
            made.meta["example_value"] = row.new_empty((count, *row.shape)).requires_grad_(needs)
        return made

    def _groups(self, items: list[fx.Node]) -> Iterator[Group]:
        """The items in order: rows that follow each other evenly as one group, all others by themselves."""
        places: list[Item] = [(stacked, (row,)) for stacked, row in (self.emitted.get(i, (i, 0)) for i in items)]
        at = 0
        while at < len(items):
            period, count = longest(places, at)
            if count == 1 and self._neighbours(items[at : at + 2]):
                count = 2
            block = items[at : at + period]
            if count > 1 and ((0,) in slopes(places, at, period) or not _same_shape(block)):
                period, count = 1, 1
            stop = at + period * count
            yield [items[at + column : stop : period] for column in range(period)]
            at = stop

    def _neighbours(self, items: list[fx.Node]) -> bool:
        """Whether two nodes are rows of one stacked output, one next to the other."""
        places = [self.emitted[item] for item in items if item in self.emitted]
        return len(places) == 2 and places[0][0] is places[1][0] and abs(places[0][1] - places[1][1]) == 1

    def _piece(self, group: Group, dim: int, stack: bool) -> fx.Node:
        """A group stacked along ``dim``, or concatenated there."""
        call = self._call
        if _single(group):
            node = self.value(group[0][0])
            return call(torch.unsqueeze, node, dim) if stack else node
        columns = [self._column(rows, dim) for rows in group]
        if len(columns) == 1:
            return columns[0] if stack else call(torch.flatten, columns[0], dim, dim + 1)
        return call(torch.flatten, call(torch.stack, columns, dim + 1), dim, dim + (1 if stack else 2))

    def _call(self, function: Callable[..., object], *args: Any) -> fx.Node:
        """A call that gathers rows."""
        made = self.graph.call_function(function, args)
        made.meta[COLLECTED] = ROWS
        return made

    def _column(self, group: list[fx.Node], dim: int) -> fx.Node:
        """Rows of one stacked output stacked along ``dim``."""
        call, where = self._call, self.emitted
        (whole, first), last = where[group[0]], where[group[-1]][1]
        step, stacked = where[group[1]][1] - first, self._holding(group)
        rows = example(whole)
        if abs(step) > 1:
            low = min(first, last)
            stacked = call(operator.getitem, stacked, slice(low, low + abs(step) * len(group), abs(step)))
        elif rows is None or rows.shape[0] != len(group):
            stacked = call(torch.narrow, stacked, 0, min(first, last), len(group))
        if step < 0:
            stacked = call(torch.flip, stacked, [0])
        return call(torch.movedim, stacked, 0, dim) if dim else stacked


def _needs(node: fx.Node) -> bool:
    value = example(node)
    return value is not None and value.requires_grad


def _same_shape(items: list[fx.Node]) -> bool:
    return len({value.shape if value is not None else None for value in map(example, items)}) == 1


def _single(group: Group) -> bool:
    return len(group) == 1 and len(group[0]) == 1
