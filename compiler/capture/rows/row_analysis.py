"""What depends on a recurrence, and whether it holds one row per time step.

A row-wise operation gives row t of its result from row t of its operands (and from values without time). It can then be
done on one row: with a time dimension of size one all its arguments stay, but for sizes that are written out.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from reroll.capture.rows.row_rules import Rows, argument, pointwise, rule_of, shape, updated
from reroll.graph.effects import example, is_random, is_torchs, modes, operation, spelled
from reroll.graph.inplace import out_of_place
from reroll.graph.lines import where
from reroll.recurrence import Recurrence


class Illegal(Exception):
    """Why two loops cannot be one; empty where one does not read the other."""


def rows_of(graph: fx.Graph, call: fx.Node, recurrence: Recurrence) -> dict[fx.Node, Rows | str]:
    """What depends on a recurrence: its rows, or why it has none (empty if another recurrence is in between)."""
    found: dict[fx.Node, Rows | str] = {call: ""}
    carried, steps = len(recurrence.carries), recurrence.steps
    for pick in call.users:
        number: Any = pick.args[1]
        if number < carried:
            found[pick] = "it needs the last state of the first"
        elif recurrence.kept_rows[number - carried].whole:
            found[pick] = Rows(0, 1, steps, 0, 0, steps)
        else:
            found[pick] = "the first keeps the rows of some steps alone"
    return follow(graph, call, found)


def follow(graph: fx.Graph, call: fx.Node, found: dict[fx.Node, Rows | str]) -> dict[fx.Node, Rows | str]:
    """What depends on the values that are given, with rows or without, where it runs in the modes of a recurrence."""
    mode = dict(zip(graph.nodes, modes(list(graph.nodes)), strict=False))
    for node in graph.nodes:
        reasons = [found[n] for n in node.all_input_nodes if isinstance(found.get(n), str)]
        if node in found or not any(n in found for n in node.all_input_nodes):
            continue
        if node.op == "call_module":
            found[node] = ""
        elif reasons and not _joins(node, found):
            found[node] = reasons[0]
        elif mode[node] != mode[call]:
            found[node] = f"{_at(node)} runs in another gradient or autocast mode"
        else:
            found[node] = _apply(node, timed(found)) or _why(node)
    return found


def timed(rows: Mapping[fx.Node, Rows | str]) -> dict[fx.Node, Rows]:
    """The values that have rows."""
    return {node: each for node, each in rows.items() if isinstance(each, Rows)}


def is_pick(node: fx.Node, call: fx.Node) -> bool:
    """Whether a node is one of a recurrence's results."""
    return node.target is operator.getitem and node.args[0] is call


def rowwise_outputs(
    call: fx.Node, rows: Mapping[fx.Node, Rows], readers: Container[fx.Node]
) -> dict[fx.Node, set[fx.Node]]:
    """The stacked outputs of which nobody but some ``readers`` reads more than rows, with all that follows from each.

    None of these is held for all steps where the readers are given what they need in another way.
    """
    found = dict[fx.Node, set[fx.Node]]()
    for pick in (node for node in rows if is_pick(node, call)):
        behind, todo = {pick}, [pick]
        while todo:
            new = [user for user in todo.pop().users if user in rows and user not in behind]
            behind.update(new)
            todo += new
        if all(user in rows or user in readers for node in behind for user in node.users):
            found[pick] = behind
    return found


def _apply(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    if not is_torchs(node) or is_random(node) or not node.args or not all(_known(n) for n in node.all_input_nodes):
        return None
    rule = rule_of(node)
    if rule is None:
        return None
    if node.target is out_of_place:
        return updated(node, rows) if rule is pointwise else None
    made = rule(node, rows)
    value = example(node)
    if made is not None and value is not None and value.shape[made.dim] != made.length * made.inner:
        return None
    return made


def _joins(node: fx.Node, found: Mapping[fx.Node, Rows | str]) -> bool:
    """Whether a node joins rows of the loop and others, which may depend on the loop as they like, to one value."""
    items: Any = node.args[0] if node.args else ()
    if operation(node).rows != "cat" or not all(example(item) is not None for item in items):
        return False
    joined = [rows for item in items if isinstance(rows := found.get(item), Rows)]
    dim = argument(node, 1, "dim", 0) % len(shape(items[0]))
    return len(joined) == 1 and joined[0].dim == dim


def _known(node: fx.Node) -> bool:
    return "example_value" in node.meta or node.target is torch.unbind


def _at(node: fx.Node) -> str:
    return f"{spelled(node)} at {where(node)}"


def _why(node: fx.Node) -> str:
    if operation(node).name == "batch_norm":
        return f"{_at(node)} takes its statistics over all time steps at once"
    if operation(node).rows == "one":
        return "it needs single steps of the first"
    if is_random(node):
        return f"{_at(node)} draws the random numbers of all time steps at once"
    return f"{_at(node)} is not known to act on each time step alone"
