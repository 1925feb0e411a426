"""Steps of a recurrence, or one row of a value, as plain operations of the graph around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from reroll.capture.rows.row_analysis import Illegal
from reroll.capture.rows.row_rules import Rows
from reroll.capture.steps.outer import COLLECTED, ROWS
from reroll.graph.effects import example, operation
from reroll.graph.fakes import resized
from reroll.graph.inplace import out_of_place
from reroll.recurrence import Items, Numbers, PerStep, Recurrence, between, without


@dataclass
class RowEmitter:
    """Does for one row what a graph does for all: time has one entry in whatever is emitted (or ``inner`` of them).

    ``leaf`` gives row r of a stacked output, ``spread`` that of an operand that has rows but is not made by the loop
    (operand, time dimension, row, entries of a row), ``constant`` an operand without time.
    """

    graph: fx.Graph
    rows: Mapping[fx.Node, Rows]
    leaf: Callable[[fx.Node, int], fx.Node]
    spread: Callable[[fx.Node, int, int, int], fx.Node]
    constant: Callable[[fx.Node], fx.Node]
    made: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)

    def row(self, node: fx.Node, r: int) -> fx.Node:
        """Row r of a value, without its time dimension."""
        made = self.graph.call_function(torch.select, (self.emit(node, r), self.rows[node].dim, 0))
        value = example(node)
        assert value is not None
        made.meta["example_value"] = _without(value, self.rows[node].dim)
        return made

    def emit(self, node: fx.Node, r: int) -> fx.Node:
        """Row r of a value, with its time dimension."""
        if (node, r) not in self.made:
            self.made[node, r] = self._emit(node, r)
        return self.made[node, r]

    def _emit(self, node: fx.Node, r: int) -> fx.Node:
        rows = self.rows[node]
        if node.op == "placeholder":
            return self.spread(node, rows.dim, r, 1)
        if node.target is operator.getitem and node.args[0].op == "call_module":  # type: ignore[union-attr]
            return self._like(self.graph.call_function(torch.unsqueeze, (self.leaf(node, r), 0)), node)
        if rows.passes is not None:
            return self._passed(node, r + rows.passes)
        dims = dict(rows.spread)

        def operand(n: fx.Node) -> fx.Node:
            if n in self.rows:
                return self.emit(n, r)
            return self.spread(n, dims[n], r, 1) if n in dims else self.constant(n)

        args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
        if rows.sizes is not None:
            method = "expand" if operation(node).rows == "expanded" else "reshape"
            return self._like(self.graph.call_method(method, (args[0], rows.sizes)), node)
        if node.target is out_of_place:
            args = (args[0], args[1], ((),), *args[3:])
        return self._like(self.graph.create_node(node.op, node.target, args, kwargs, name=node.name), node)

    def _passed(self, node: fx.Node, r: int) -> fx.Node:
        """A row of one of the pieces that a cat or a narrow over time passes on."""
        pieces: Any = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
        rows = self.rows[node]
        for piece in pieces:
            value = example(piece)
            assert value is not None
            length = value.shape[rows.dim] // rows.inner
            if r < length:
                return self.emit(piece, r) if piece in self.rows else self.spread(piece, rows.dim, r, rows.inner)
            r -= length
        raise AssertionError("every row is in a piece")

    def _like(self, made: fx.Node, node: fx.Node) -> fx.Node:
        made.meta = dict(node.meta)
        value, rows = example(node), self.rows[node]
        if value is not None:
            shape = (*value.shape[: rows.dim], rows.inner, *value.shape[rows.dim + 1 :])
            made.meta["example_value"] = resized(value, shape)
        return made


def outer_emitter(graph: fx.Graph, rows: Mapping[fx.Node, Rows]) -> RowEmitter:
    """Gives rows that are not made in the loop, by operations of the graph around it."""

    def leaf(stacked: fx.Node, r: int) -> fx.Node:
        raise Illegal(f"row {r} of {stacked} is made in the loop")

    def spread(source: fx.Node, dim: int, at: int, inner: int) -> fx.Node:
        value = example(source)
        if value is not None and value.shape[dim] == inner:
            return source
        return graph.call_function(torch.narrow, (source, dim, at * inner, inner))

    return RowEmitter(graph, rows, leaf, spread, lambda n: n)


def peel(graph: fx.Graph, call: fx.Node, recurrence: Recurrence, head: int, tail: int) -> Recurrence:
    """Take steps off the head and the tail of a recurrence: they become operations around its call."""
    if not head and not tail:
        return recurrence
    if not all(each.whole for each in recurrence.kept_rows):
        raise Illegal("one of the two keeps the rows of some steps alone")
    carried, stop = len(recurrence.carries), recurrence.steps - tail
    found = [node for node in call.users if node.target is operator.getitem]
    picks = [node for node in found if node.users]
    for unread in set(found).difference(picks):  # left by peeling before
        graph.erase_node(unread)
    operands: list[Any] = list(call.args)
    carries, rows = operands[:carried], []
    with graph.inserting_before(call):
        for t in range(head):
            carries, ys = _step(graph, recurrence, carries, operands, t)
            rows.append(ys)
    call.args = (*carries, *operands[carried:])
    needs = zip(carries, recurrence.examples, strict=False)
    initial = (like.detach().requires_grad_(like.requires_grad or _needs(node)) for node, like in needs)
    examples = (*initial, *recurrence.examples[carried:])
    here, ends = call.next, []
    with graph.inserting_before(here):
        lasts = [graph.call_function(operator.getitem, (call, i)) for i in range(carried + len(recurrence.ys))]
        carries = lasts[:carried]
        for t in range(stop, recurrence.steps):
            carries, ys = _step(graph, recurrence, carries, operands, t)
            ends.append(ys)
        for pick in picks:
            index: Any = pick.args[1]
            made = (
                carries[index] if index < carried else _joined(graph, pick, lasts[index], index - carried, rows, ends)
            )
            pick.replace_all_uses_with(made)
            made.meta.setdefault("example_value", example(pick))
    for pick in picks:
        graph.erase_node(pick)
    xs = tuple(between(x, head, stop) for x in recurrence.xs)
    return replace(without(recurrence, head, tail), steps=stop - head, xs=xs, examples=examples)


def _step(
    graph: fx.Graph, recurrence: Recurrence, carries: list[Any], operands: list[Any], t: int
) -> tuple[list[Any], list[Any]]:
    """One step of a recurrence as operations: (next carries, outputs)."""
    xs = [_x(graph, x, operands, t) for x in recurrence.xs]
    inputs = [*carries, *xs, *(operands[i] for i in recurrence.constants)]
    placeholders = recurrence.step.graph.find_nodes(op="placeholder")
    results: Any = graph.graph_copy(recurrence.step.graph, dict(zip(placeholders, inputs, strict=True)))
    return list(results[: len(carries)]), list(results[len(carries) :])


def _x(graph: fx.Graph, x: PerStep, operands: list[Any], t: int) -> fx.Node:
    if isinstance(x, Items):
        return operands[x.operands[t]]  # type: ignore[no-any-return]
    if isinstance(x, Numbers):
        return graph.call_function(torch.tensor, (x.values[t],), {"dtype": x.dtype})
    source = operands[x.operand]
    made = graph.call_function(torch.select, (source, x.dim, x.start + x.stride * t))
    if isinstance(source, fx.Node) and (source.meta.get(COLLECTED) == ROWS or _is_result(source)):
        made.meta[COLLECTED] = ROWS
    value = example(source)
    if value is not None:
        made.meta["example_value"] = _without(value, x.dim)
    return made


def _without(value: torch.Tensor, dim: int) -> torch.Tensor:
    """An example of a value without a dimension."""
    return resized(value, [size for at, size in enumerate(value.shape) if at != dim])


def _needs(node: fx.Node) -> bool:
    value = example(node)
    return value is not None and value.requires_grad


def _joined(graph: fx.Graph, old: fx.Node, stacked: fx.Node, index: int, head: list[Any], tail: list[Any]) -> fx.Node:
    """The outputs of all steps: those peeled before, those of the loop, those peeled behind."""
    whole = example(old)
    assert whole is not None
    stacked.meta["example_value"] = resized(whole, (whole.shape[0] - len(head) - len(tail), *whole.shape[1:]))
    pieces = [_row(graph, ys[index], whole) for ys in head] + [stacked] + [_row(graph, ys[index], whole) for ys in tail]
    made = graph.call_function(torch.cat, (pieces, 0))
    made.meta = {**old.meta, COLLECTED: ROWS}
    return made


def _is_result(node: fx.Node) -> bool:
    """Whether a node is a result of a loop as it is."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    return isinstance(call, fx.Node) and call.op == "call_module"


def _row(graph: fx.Graph, node: fx.Node, whole: torch.Tensor) -> fx.Node:
    made = graph.call_function(torch.unsqueeze, (node, 0))
    made.meta |= {"example_value": resized(whole, (1, *whole.shape[1:])), COLLECTED: ROWS}
    return made
