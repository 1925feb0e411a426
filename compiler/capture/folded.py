"""Graphs of which the middle runs of a loop are left out, as they do what the runs before them do.

``skipped_runs(n)`` stands where n runs are missing, and ``run_ended()`` where the first run behind them ends. What is
read of a run that is missing is ``row_of_run(value, n)``: the value that ``value``, of the last run before these, has
n runs later. Numbers and sizes are those of the whole graph. Such a graph is not run: it is rolled, or unfolded first.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

UNFOLD = "unfold"
"""What a module's ``meta`` holds what writes all runs out under, where some are missing."""


SIDE = "side"
"""What nodes around a mark have in ``meta``: the number of the mark, and whether they come behind it, wherever they are
moved."""


class Gapped(Exception):
    """What is looked for cannot be told while runs are missing."""


def skipped_runs(runs: int, mark: int) -> None:
    """Stands for so many runs like those before it; ``mark``: its number."""
    raise AssertionError("a folded graph is not run")


def run_ended() -> None:
    """Stands at the end of the first run behind those that are missing."""
    raise AssertionError("a folded graph is not run")


def row_of_run(value: Tensor, runs: int) -> Tensor:
    """The value so many runs later, in a run that is missing."""
    raise AssertionError("a folded graph is not run")


def side_of(node: fx.Node, mark: fx.Node) -> bool | None:
    """Whether a node comes behind a mark; None where its place says so."""
    number, behind = node.meta.get(SIDE, (None, False))
    return behind if number == mark.args[1] else None


def is_mark(node: fx.Node) -> bool:
    """Whether a node marks where runs are missing."""
    return node.target in (skipped_runs, run_ended)


def is_row(node: fx.Node) -> bool:
    """Whether a node is a value of a run that is missing."""
    return node.target is row_of_run


def written_for(node: fx.Node) -> fx.Node:
    """The node that is written down for one: of a value of a missing run that of the run before these, else itself."""
    like = node.args[0] if is_row(node) else node
    assert isinstance(like, fx.Node)
    return like


def unfolded(module: fx.GraphModule) -> fx.GraphModule:
    """The module with all runs written out, in its own graph; as it is where none is missing."""
    unfold: Callable[[], None] | None = module.meta.pop(UNFOLD, None)
    if unfold is not None:
        unfold()
        module.recompile()
    return module
