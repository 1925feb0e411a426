"""Row-wise operations on the model's input in front of a loop become part of its step.

``fc(x)`` over all steps before the loop is an example: with it in the step, neither it nor its gradient is held for all
steps; the input is the user's in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from reroll.capture.rows.hoist import add_examples, copy_with_examples, row_read, settle_fills
from reroll.capture.rows.peel import RowEmitter, outer_emitter
from reroll.capture.rows.row_analysis import Illegal, follow, timed
from reroll.capture.rows.row_rules import Rows
from reroll.capture.rows.step_builder import StepBuilder
from reroll.graph.editing import drop_dead
from reroll.graph.effects import example, is_weight, operation
from reroll.program.registry import register_pass
from reroll.recurrence import Capture, Recurrence, Slices


@register_pass("fold-inputs", on="loops")
def fold_inputs(loops: Capture, /) -> Capture:
    """Have each recurrence read the model's input itself, where that is legal."""
    settled = replace(loops, outer=copy_with_examples(loops.outer))
    settle_fills(settled.outer)
    for name in [each.name for each in loops.recurrences]:
        while (fed := _fed(settled, name)) is not None:
            loops = settled = fed
    return loops


def _fed(found: Capture, name: str) -> Capture | None:
    """A capture with one more of the values that a recurrence reads made in its step; None where none can be."""
    recurrence = next(each for each in found.recurrences if each.name == name)
    for place in range(len(recurrence.xs)):
        try:
            _reads(found.outer, recurrence, place)  # on the graph itself first: a copy takes as long as all else
            graph = copy_with_examples(found.outer)
            fed = _without(graph, recurrence, place)
        except Illegal:
            continue
        recurrences = tuple(fed if each.name == name else each for each in found.recurrences)
        return replace(found, outer=graph, recurrences=recurrences)
    return None


def _reads(
    graph: fx.Graph, recurrence: Recurrence, place: int
) -> tuple[fx.Node, Mapping[fx.Node, Rows], list[tuple[fx.Node, int]]]:
    """A recurrence's call, how a value that it reads follows from an input, and who else reads which row of the value.

    Raises Illegal.
    """
    call, x = next(node for node in graph.nodes if node.target == recurrence.name), recurrence.xs[place]
    if not isinstance(x, Slices) or x.operand in recurrence.constants:
        raise Illegal("it is read whole")
    source: Any = call.args[x.operand]
    if source.op == "placeholder" or source in call.args[: len(recurrence.carries)]:
        raise Illegal("it is an input, or read whole")
    rows = next(_sources(graph, call, source, x.dim), None)
    reads = [(user, row_read(user)) for user in source.users if user is not call]
    if rows is None or any(read is not source or dim != x.dim for _, (read, dim, _) in reads):
        raise Illegal("it is read whole, or is no input's row by row")
    return call, rows, [(user, at % rows[source].length) for user, (_, _, at) in reads]


def _without(graph: fx.Graph, recurrence: Recurrence, place: int) -> Recurrence:
    """The recurrence that makes one of its per-step inputs itself; the graph is changed. Raises Illegal."""
    call, rows, reads = _reads(graph, recurrence, place)
    x: Any = recurrence.xs[place]
    source: Any = call.args[x.operand]
    fed = _fused(call, recurrence, place, x, rows)
    around, here = outer_emitter(graph, rows), source.next  # rows share what was emitted before: all of it in order
    for user, at in reads:
        with graph.inserting_before(here):
            made = around.row(source, at)
        user.replace_all_uses_with(made)
    drop_dead(graph)
    add_examples(graph)
    settle_fills(graph)
    graph.lint()
    return fed


def _sources(graph: fx.Graph, call: fx.Node, source: fx.Node, dim: int) -> Iterator[Mapping[fx.Node, Rows]]:
    """How a value follows row by row from an input of the graph, for each input from which it does."""
    value = example(source)
    if value is None or source.op == "placeholder":
        return
    for node in graph.find_nodes(op="placeholder"):
        given = example(node)
        if given is None or is_weight(node) or _is_written(node):
            continue
        for at, size in enumerate(given.shape):
            if size != value.shape[dim]:
                continue
            rows = timed(follow(graph, call, {node: Rows(at, 1, size, 0, 0, size)}))
            found = rows.get(source)
            whole = found is not None and (found.dim, found.inner, found.length) == (dim, 1, size) and found.shift == 0
            if whole and not _is_view(source, node):
                yield rows


def _is_written(node: fx.Node) -> bool:
    """Whether an input is updated at the end: its old value is then read off a copy, which must not be made later."""
    return any(user.target == "copy_" and user.args[0] is node for user in node.users)


def _is_view(node: Any, source: fx.Node) -> bool:
    """Whether a value is only another view of an input."""
    if node is source or not isinstance(node, fx.Node):
        return node is source
    return operation(node).view != "" and _is_view(node.args[0], source)


def _fused(call: fx.Node, recurrence: Recurrence, place: int, x: Slices, rows: Mapping[fx.Node, Rows]) -> Recurrence:
    _, xs, _ = recurrence.inputs
    step = StepBuilder(len(recurrence.carries), x.stride)
    carries = step.carries(recurrence)
    env = carries | step.inputs(call, recurrence, (place,))

    def leaf(node: fx.Node, _: int) -> fx.Node:
        raise AssertionError(f"{node} is no input")

    emitter = RowEmitter(step.graph, rows, leaf, step.spread, step.constant)
    env[xs[place]] = emitter.row(call.args[x.operand], x.start)  # type: ignore[arg-type]
    return step.extend(call, recurrence, list(carries.values()), step.body(recurrence.step, env))
