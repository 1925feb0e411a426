"""Where nothing but the last row of an output is read, it is taken from the loop's last carries.

``nn.LSTM(...)(x)[0][-1]`` is an example: its states are then not held for all steps. What is made of all rows before
one is read, as in ``readout(states)[-1]``, is made of that one alone.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from reroll.capture.rows.hoist import copy_with_examples, row_read
from reroll.capture.rows.peel import RowEmitter, outer_emitter
from reroll.capture.rows.row_analysis import Illegal, is_pick, rows_of, rowwise_outputs, timed
from reroll.capture.rows.row_rules import Rows
from reroll.graph.effects import example, gradient_sources
from reroll.passes.loop.gradient_reach import one_mode, reached_operands
from reroll.passes.loop.reductions import total_of
from reroll.passes.loop.rewrite import rewritten, where_legal
from reroll.program.registry import register_pass
from reroll.recurrence import Capture, Recurrence


@register_pass("take-last-rows", on="loops")
def take_last_rows(loops: Capture, /) -> Capture:
    """Take rows that the last step made from the last carries."""
    return where_legal(loops, _last_reads, _taken)


def _last_reads(graph: fx.Graph, recurrence: Recurrence) -> tuple[fx.Node, Mapping[fx.Node, Rows], dict[fx.Node, int]]:
    """A recurrence's call, the rows behind it, and who reads which of these, made in its last step or outside of it.

    Raises Illegal.
    """
    call = next(node for node in graph.nodes if node.target == recurrence.name)
    rows = timed(rows_of(graph, call, recurrence))
    carried = _carried(recurrence)
    reads = dict(_reads(call, rows, recurrence.steps, carried))
    totals = [node for node in graph.nodes if total_of(node, rows) is not None]  # may be added up in the loop, next
    gone = rowwise_outputs(call, rows, {*reads, *totals})
    behind = {node for nodes in gone.values() for node in nodes}
    taken = {node: at for node, at in reads.items() if row_read(node)[0] in behind}
    if not taken:
        raise Illegal("more than last rows is read, or these are no carries")
    return call, rows, taken


def _reads(
    call: fx.Node, rows: Mapping[fx.Node, Rows], steps: int, carried: Container[int]
) -> Iterator[tuple[fx.Node, int]]:
    for node in call.graph.nodes:
        source, dim, at = row_read(node)
        found = rows.get(source) if source is not None else None
        if source is None or found is None or found.dim != dim or found.inner != 1:
            continue
        at %= found.length
        last = at == found.last - 1 and at - found.shift == steps - 1
        if not found.first <= at < found.last or (
            last and all(each in carried for each in _picked(source, call, rows))
        ):
            yield node, at


def _picked(node: fx.Node, call: fx.Node, rows: Mapping[fx.Node, Rows]) -> Iterator[int]:
    """The numbers of the results from which rows follow."""
    if is_pick(node, call):
        yield int(node.args[1])  # type: ignore[arg-type]
    else:
        for each in (each for each in node.all_input_nodes if each in rows):
            yield from _picked(each, call, rows)


def _carried(recurrence: Recurrence) -> dict[int, int]:
    """Results of the step that are the same value as a carry, and the number of that."""
    results: Any = recurrence.step.graph.output_node().args[0]
    wide = len(recurrence.carries)
    numbers = {node: number for number, node in reversed([*enumerate(results[:wide])])}
    return {number: numbers[node] for number, node in enumerate(results) if number >= wide and node in numbers}


def _refuse_lost(graph: fx.Graph, call: fx.Node, recurrence: Recurrence, made: Mapping[fx.Node, fx.Node]) -> None:
    """Raise Illegal where an input would have no gradient that has one, of zeros, as all rows depend on it."""
    carried = _carried(recurrence)
    behind = {carry: reached_operands(recurrence, carry) for carry in {*carried.values()}}

    def inputs(node: fx.Node) -> Iterable[fx.Node]:
        if not is_pick(node, call):
            return node.all_input_nodes
        number = int(node.args[1])  # type: ignore[arg-type]
        operands = behind.get(carried.get(number, number))
        return [call.args[each] for each in operands] if operands is not None else [node]  # type: ignore[misc]

    def leaves(nodes: Iterable[fx.Node]) -> set[fx.Node]:
        found = {each for node in nodes for each in gradient_sources(node, inputs)}
        return {each for each in found if each.op == "placeholder" or (is_pick(each, call) and [each] == inputs(each))}

    if not one_mode(graph) or not leaves(made) <= leaves(made.values()):
        raise Illegal("some inputs are read by other rows alone")


def _dense(graph: fx.Graph, row: fx.Node) -> fx.Node:
    """A row as it lies among all rows, which a carry need not: that of a transposed state is one."""
    value = example(row)
    if value is None or value.dim() < 2 or not value.is_contiguous():
        return row
    with graph.inserting_after(row):
        made = graph.call_method("contiguous", (row,))
    made.meta = dict(row.meta)
    return made


def _taken(found: Capture, recurrence: Recurrence) -> Capture:
    graph = copy_with_examples(found.outer)
    call, rows, reads = _last_reads(graph, recurrence)
    carried, around = _carried(recurrence), outer_emitter(graph, rows)

    def last(stacked: fx.Node, r: int) -> fx.Node:
        """The last row of a stacked output."""
        if r != recurrence.steps - 1 or int(stacked.args[1]) not in carried:  # type: ignore[arg-type]
            raise Illegal("another row than the last one of a carry is read")
        made = graph.call_function(operator.getitem, (call, carried[int(stacked.args[1])]))  # type: ignore[arg-type]
        value = example(stacked)
        assert value is not None
        made.meta["example_value"] = value.select(0, 0)
        return made

    emitter = RowEmitter(graph, rows, last, around.spread, around.constant)
    made = dict[fx.Node, fx.Node]()
    for node, at in reads.items():  # in the order of the graph, as rows share what was made for those before
        with graph.inserting_before(node):
            made[node] = emitter.row(row_read(node)[0], at)  # type: ignore[arg-type]
    _refuse_lost(graph, call, recurrence, made)
    for node, row in made.items():
        row.meta = dict(node.meta)
        node.replace_all_uses_with(_dense(graph, row))
    return rewritten(found, graph, call, recurrence, recurrence)
