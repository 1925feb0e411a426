"""What a loss, a mean or a sum makes of all steps behind a loop is added up in the loop.

``cross_entropy(readout(states).flatten(0, 1), targets.flatten())`` is an example: the step then makes the loss of its
own row and adds it to a carry, so that neither states nor scores are held for all steps. A mean is a sum that is
divided at the end. Sums of floating point numbers are carried in double precision, as there may be a million steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from reroll.capture.rows.hoist import add_examples, copy_with_examples, hoist
from reroll.capture.rows.peel import RowEmitter, outer_emitter, peel
from reroll.capture.rows.row_analysis import Illegal, rows_of, rowwise_outputs, timed
from reroll.capture.rows.row_rules import Rows
from reroll.capture.rows.step_builder import StepBuilder
from reroll.graph.editing import drop_dead
from reroll.graph.effects import example, modes
from reroll.graph.lines import take_line
from reroll.passes.loop.reductions import Total, total_of
from reroll.passes.loop.rewrite import OUTSIDE, check_all_steps, rewritten, where_legal
from reroll.program.registry import register_pass
from reroll.recurrence import Capture, Items, Recurrence


@register_pass("fold-reductions", on="loops")
def fold_reductions(loops: Capture, /) -> Capture:
    """Have each loop add up what is summed over its steps."""
    return where_legal(loops, _look, _added)


def _look(graph: fx.Graph, recurrence: Recurrence) -> None:
    """Raise Illegal where nothing can be added up."""
    _, _, totals = _totals(graph, recurrence)
    check_all_steps((total.rows for total in totals), recurrence.steps - _unread(totals, recurrence))


def _totals(graph: fx.Graph, recurrence: Recurrence) -> tuple[fx.Node, dict[fx.Node, Rows | str], list[Total]]:
    """A recurrence's call, what depends on it, and the totals for which an output need not be held. Raises Illegal."""
    call = next(node for node in graph.nodes if node.target == recurrence.name)
    analysed = rows_of(graph, call, recurrence)
    rows, mode = timed(analysed), dict(zip(graph.nodes, modes(list(graph.nodes)), strict=False))
    totals = {
        node: total
        for node in graph.nodes
        if mode.get(node) == mode[call] and (total := total_of(node, rows)) is not None
    }
    gone = rowwise_outputs(call, rows, totals)
    kept = [total for node, total in totals.items() if any(gone[pick] & {*node.all_input_nodes} for pick in gone)]
    if not kept:
        raise Illegal("nothing need not be held")
    return call, analysed, kept


def _unread(totals: list[Total], recurrence: Recurrence) -> int:
    """How many last steps no total reads, as where each step is to tell the next entry of its sequence: they are taken
    off the loop. Not of one that reads lists, of which an item that nobody reads would have no gradient."""
    ends = {total.rows.last - total.rows.shift for total in totals}
    if len(ends) > 1 or recurrence.random or any(isinstance(x, Items) for x in recurrence.xs):
        return 0
    unread = recurrence.steps - ends.pop()
    return unread if unread <= min(OUTSIDE, recurrence.steps - 1) else 0


def _added(found: Capture, recurrence: Recurrence) -> Capture:
    graph = copy_with_examples(found.outer)
    call, _, totals = _totals(graph, recurrence)
    shorter = recurrence
    if unread := _unread(totals, recurrence):
        shorter = replace(peel(graph, call, recurrence, 0, unread), dropped=True)
        drop_dead(graph)
        add_examples(graph)
    call, analysed, totals = _totals(graph, shorter)
    check_all_steps((total.rows for total in totals), shorter.steps)
    wide, rows = len(recurrence.carries), timed(analysed)
    made, needs = _extended(call, shorter, totals, rows)
    hoist(graph, call, needs, {each.name for each in found.recurrences if each.random}, analysed)
    for at, total in enumerate(totals):
        _finish(graph, call, wide + at, total, rows)
    return rewritten(found, graph, call, recurrence, made)


def _extended(
    call: fx.Node, recurrence: Recurrence, totals: list[Total], rows: Mapping[fx.Node, Rows]
) -> tuple[Recurrence, list[fx.Node]]:
    """The recurrence with a carry for each total, and what must be made before its call."""
    wide = len(recurrence.carries)
    step = StepBuilder(wide + len(totals))
    carries = step.carries(recurrence)
    given = step.body(recurrence.step, carries | step.inputs(call, recurrence, ()))
    emitter = RowEmitter(step.graph, rows, lambda node, _: given[int(node.args[1])], step.spread, step.constant)  # type: ignore[arg-type]
    sums, starts, ends = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for total in totals:
        with call.graph.inserting_before(call):
            starts.append(_zero(call.graph, total))
        sums.append(step.placeholder(f"sum_{total.node.name}", example(starts[-1])))
        ends.append(_plus(step.graph, sums[-1], total, emitter, total.rows.shift))
    first = [like for like in map(example, starts) if like is not None]
    examples = (*recurrence.examples[:wide], *first, *recurrence.examples[wide:])
    widened = replace(recurrence, examples=examples, peeled=recurrence.peeled + (None,) * len(totals))
    call.args = (*call.args[:wide], *starts)
    for pick in list(call.users):
        if (index := int(pick.args[1])) >= wide:  # type: ignore[arg-type]
            pick.args = (call, index + len(totals))
    made = step.extend(call, widened, [*carries.values(), *sums], [*given[:wide], *ends, *given[wide:]])
    return made, list(call.all_input_nodes)


def _zero(graph: fx.Graph, total: Total) -> fx.Node:
    """What a sum begins with."""
    value = total.value
    options: dict[str, Any] = {"dtype": total.dtype, "device": value.device}
    made = graph.call_function(torch.full, (tuple(value.shape), 0), options)
    made.meta["example_value"] = value.detach().new_empty(value.shape, dtype=total.dtype)
    take_line(made, total.node)
    return made


def _plus(graph: fx.Graph, sum_: fx.Node, total: Total, emitter: RowEmitter, r: int) -> fx.Node:
    """A sum with what row r gives."""
    part = total.of_row(emitter, r)
    made = part
    if total.part != total.dtype:
        made = graph.call_method("to", (part, total.dtype))
    for node in (part, made):
        node.meta["example_value"] = _like(total, total.part if node is part else total.dtype)
    result = graph.call_function(torch.add, (sum_, made))
    result.meta["example_value"] = _like(total, total.dtype)
    for node in (part, made, result):
        take_line(node, total.node)
    return result


def _like(total: Total, dtype: torch.dtype) -> torch.Tensor:
    made = total.value.detach().new_empty(total.value.shape, dtype=dtype)
    return made.requires_grad_(total.value.requires_grad)


def _finish(graph: fx.Graph, call: fx.Node, index: int, total: Total, rows: Mapping[fx.Node, Rows]) -> None:
    """Put in place of a total what the loop has added up, with rows that are not made in it."""
    around, at = outer_emitter(graph, rows), total.rows
    with graph.inserting_before(total.node):
        made = graph.call_function(operator.getitem, (call, index))
        made.meta["example_value"] = _like(total, total.dtype)
        for r in (*range(at.first), *range(at.last, at.length)):
            made = _plus(graph, made, total, around, r)
        for node in total.ended(graph, made):
            node.meta.setdefault("example_value", _like(total, total.dtype))
            take_line(node, total.node)
            made = node
        if total.value.dtype != total.dtype:
            made = graph.call_method("to", (made, total.value.dtype))
    made.meta = dict(total.node.meta)
    total.node.replace_all_uses_with(made)
    graph.erase_node(total.node)
