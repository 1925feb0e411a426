"""Row-wise operations behind a loop become part of its step, where that makes what is held for all steps smaller.

A readout of the stacked states, (steps, batch, neurons) to (steps, batch, classes), is an example: the states are then
not held for all steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from reroll.capture.rows.hoist import copy_with_examples, hoist
from reroll.capture.rows.peel import RowEmitter, outer_emitter
from reroll.capture.rows.row_analysis import Illegal, is_pick, rows_of, timed
from reroll.capture.rows.row_rules import Rows
from reroll.capture.rows.shown_layouts import as_it_lay
from reroll.capture.rows.step_builder import StepBuilder
from reroll.graph.effects import example
from reroll.graph.fakes import resized
from reroll.passes.loop.rewrite import check_all_steps, rewritten, where_legal
from reroll.program.registry import register_pass
from reroll.recurrence import Capture, Recurrence


@register_pass("fold-readouts", on="loops")
def fold_readouts(loops: Capture, /) -> Capture:
    """Take the readouts of each recurrence into its step."""
    return where_legal(loops, _readouts, _folded)


def _readouts(graph: fx.Graph, recurrence: Recurrence) -> tuple[fx.Node, dict[fx.Node, Rows | str], list[fx.Node]]:
    """A recurrence's call, what depends on it, and what is read of that in place of its outputs. Raises Illegal."""
    call = next(node for node in graph.nodes if node.target == recurrence.name)
    analysed = rows_of(graph, call, recurrence)
    rows = timed(analysed)
    ends = [node for node in rows if not is_pick(node, call) and any(user not in rows for user in node.users)]
    gone = [node for node in rows if is_pick(node, call) and all(user in rows for user in node.users)]
    check_all_steps((rows[end] for end in ends), recurrence.steps)
    if sum(_row_bytes(n, rows) for n in ends) >= sum(_row_bytes(n, rows) for n in gone):
        raise Illegal("nothing would be smaller")
    return call, analysed, ends


def _folded(found: Capture, recurrence: Recurrence) -> Capture:
    graph = copy_with_examples(found.outer)
    call, analysed, ends = _readouts(graph, recurrence)
    rows = timed(analysed)
    extended, needs = _extend(call, recurrence, ends, rows)
    hoist(graph, call, needs, {each.name for each in found.recurrences if each.random}, analysed)
    first = len(recurrence.carries) + len(recurrence.ys)
    whole = [_restored(graph, call, end, first + at, rows) for at, end in enumerate(ends)]
    for end, made in zip(ends, whole, strict=True):
        end.replace_all_uses_with(made)
    return rewritten(found, graph, call, recurrence, extended)


def _row_bytes(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> int:
    value = example(node)
    if value is None:
        raise Illegal(f"{node.name} is no tensor")
    return value.numel() * value.element_size() // rows[node].length


def _extend(
    call: fx.Node, recurrence: Recurrence, ends: list[fx.Node], rows: Mapping[fx.Node, Rows]
) -> tuple[Recurrence, list[fx.Node]]:
    """The recurrence with the row of each end as one more output."""
    step = StepBuilder(len(recurrence.carries))
    carries = step.carries(recurrence)
    given = step.body(recurrence.step, carries | step.inputs(call, recurrence, ()))
    emitter = RowEmitter(step.graph, rows, lambda node, _: given[int(node.args[1])], step.spread, step.constant)  # type: ignore[arg-type]
    made = []
    for end in ends:
        start = rows[end].shift  # the row that is made in step 0
        made.append(emitter.row(end, start) if rows[end].inner == 1 else emitter.emit(end, start))
    return step.extend(call, recurrence, list(carries.values()), [*given, *made]), list(step.operands)


def _restored(graph: fx.Graph, call: fx.Node, end: fx.Node, index: int, rows: Mapping[fx.Node, Rows]) -> fx.Node:
    """The value of all steps from its rows: those that the loop gives stacked, and those before and behind."""
    at, value = rows[end], example(end)
    assert value is not None
    around = outer_emitter(graph, rows)
    with graph.inserting_before(end.next):
        made = graph.call_function(operator.getitem, (call, index))
        row = (*value.shape[: at.dim], *(() if at.inner == 1 else (at.inner,)), *value.shape[at.dim + 1 :])
        stacked = made.meta["example_value"] = resized(value, (at.last - at.first, *row))
        if at.dim:
            made = graph.call_function(torch.movedim, (made, 0, at.dim))
            stacked = made.meta["example_value"] = stacked.movedim(0, at.dim)
        if at.inner > 1:
            made = graph.call_function(torch.flatten, (made, at.dim, at.dim + 1))
            made.meta["example_value"] = resized(value, stacked.flatten(at.dim, at.dim + 1).shape)
        head = [around.emit(end, r) for r in range(at.first)]
        tail = [around.emit(end, r) for r in range(at.last, at.length)]
        made = graph.call_function(torch.cat, ([*head, made, *tail], at.dim)) if head or tail else made
        made = as_it_lay(graph, made, end, at.dim if at.inner == 1 and not (head or tail) else 0, rows)
    made.meta = dict(end.meta)
    return made
