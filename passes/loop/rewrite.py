"""One rewrite of each recurrence, where it is legal: how it begins, what it may take into the step, how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import fx

from reroll.capture.rows.hoist import add_examples
from reroll.capture.rows.row_analysis import Illegal
from reroll.capture.rows.row_rules import Rows
from reroll.capture.rows.step_builder import prune
from reroll.graph.editing import drop_dead
from reroll.recurrence import Capture, Recurrence

OUTSIDE = 4  # rows of a value that are not made in the loop, at most


def where_legal(
    found: Capture, look: Callable[[fx.Graph, Recurrence], object], rewrite: Callable[[Capture, Recurrence], Capture]
) -> Capture:
    """The capture with each recurrence rewritten for which neither ``look`` nor ``rewrite`` raises Illegal.

    ``look`` comes first, on the graph itself: a copy takes as long as all else.
    """
    for name in [each.name for each in found.recurrences]:
        recurrence = next(each for each in found.recurrences if each.name == name)
        try:
            look(found.outer, recurrence)
            found = rewrite(found, recurrence)
        except Illegal:
            continue
    return found


def check_all_steps(read: Iterable[Rows], steps: int) -> None:
    """Raise Illegal unless each value has a row of every step, and hardly any others."""
    for at in read:
        if at.last - at.first < steps or at.length > steps + OUTSIDE:
            raise Illegal("what is read is not what the steps make")


def rewritten(found: Capture, graph: fx.Graph, call: fx.Node, old: Recurrence, new: Recurrence) -> Capture:
    """The capture with a graph that was edited, in which a call is one of a new recurrence; what nobody reads goes."""
    drop_dead(graph)
    pruned = prune(call, new)
    add_examples(graph)
    graph.lint()
    return replace(found, outer=graph, recurrences=tuple(pruned if r is old else r for r in found.recurrences))
