"""Loops that run one after another over the same steps become one loop, where that is legal.

If step t of a second loop reads of the first loop nothing but row t of its outputs (or what row-wise operations make of
it), one loop can run both steps one after the other: no value of all steps is alive between them. Where the loops are
off by a step or two, those steps are taken off first. Otherwise the loops stay, and a note says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from reroll.capture.rows.hoist import add_examples, copy_with_examples, hoist, row_read, settle_fills
from reroll.capture.rows.peel import outer_emitter, peel
from reroll.capture.rows.row_analysis import Illegal, rows_of, timed
from reroll.capture.rows.row_rules import Rows
from reroll.capture.rows.step_builder import merge, prune
from reroll.capture.steps.outer import COLLECTED, STACK
from reroll.graph.editing import ancestors, drop_dead
from reroll.graph.effects import is_random, modes
from reroll.graph.lines import where
from reroll.program.registry import register_pass
from reroll.recurrence import Capture, Items, Recurrence, Slices

_PEELED = 2
Refused = dict[tuple[Recurrence, Recurrence], str]  # pairs that cannot be fused, and why


@dataclass(frozen=True, slots=True)
class Lag:
    """Step t of the second loop reads step t + lag of the first; they run together over steps [start, stop)."""

    lag: int
    start: int
    stop: int


@register_pass("fuse-loops", on="loops")
def fuse_loops(loops: Capture, /) -> Capture:
    """Fuse the recurrences of a capture, where that is legal; ``notes`` say where it is not, and why."""
    if len(loops.recurrences) < 2:
        return loops
    refused: Refused = {}
    settled = replace(loops, outer=copy_with_examples(loops.outer))
    settle_fills(settled.outer)
    while (fused := _first(settled, refused)) is not None:
        loops = settled = fused
    return replace(loops, notes=(*loops.notes, *_refusals(settled, refused)))


def _first(found: Capture, refused: Refused) -> Capture | None:
    """The capture with the first pair fused that can be; those that cannot are noted, and never tried again."""
    rows: dict[Recurrence, dict[fx.Node, Rows | str]] = {}
    for first, second in _pairs(found):
        if (first, second) in refused:
            continue
        before = next(node for node in found.outer.nodes if node.target == first.name)
        if first not in rows:
            rows[first] = rows_of(found.outer, before, first)
        try:
            return _fused(found, first, second, _legal(found, before, first, second, rows[first]))
        except Illegal as error:
            refused[first, second] = str(error)
    return None


def _refusals(found: Capture, refused: Refused) -> Iterator[str]:
    for first, second in _pairs(found):
        reason = refused[first, second]
        if reason and not (first.blocks or second.blocks):  # stages of a deep network follow one another anyway
            loops = f"The loop at {first.where} and the loop at {second.where}"
            yield f"{loops} were not fused, so what is between them is held for all steps: {reason}."


def _pairs(found: Capture) -> Iterator[tuple[Recurrence, Recurrence]]:
    """Recurrences, and those behind them that read them without another one in between."""
    named = {each.name: each for each in found.recurrences}
    calls = {node: named[node.target] for node in found.outer.nodes if node.target in named}
    order = list(calls)
    for second in order:
        read = ancestors(second.all_input_nodes, calls)
        for first in reversed([call for call in order if call in read]):
            yield calls[first], calls[second]


def _legal(
    found: Capture, before: fx.Node, first: Recurrence, second: Recurrence, rows: dict[fx.Node, Rows | str]
) -> Lag:
    """How the steps of two loops stand to each other; nothing is changed. Raises Illegal if they cannot be fused."""
    after = next(node for node in found.outer.nodes if node.target == second.name)
    lag = _lag(after, second, rows, first.steps)
    _check_modes(found.outer, before, after, first, second, found)
    _check_values(before, after, first, rows)
    return lag


def _fused(found: Capture, first: Recurrence, second: Recurrence, lag: Lag) -> Capture:
    """One loop in place of two. Raises Illegal."""
    graph = copy_with_examples(found.outer)
    before, after = (next(n for n in graph.nodes if n.target == each.name) for each in (first, second))
    first = peel(graph, before, first, lag.start + lag.lag, first.steps - lag.stop - lag.lag)
    second = peel(graph, after, second, lag.start, second.steps - lag.stop)
    _forward(graph, rows_of(graph, before, first))
    rows = rows_of(graph, before, first)
    made, needs = merge(before, after, first, second, timed(rows))
    hoist(graph, before, needs, {each.name for each in found.recurrences if each.random}, rows)
    drop_dead(graph)
    made = prune(before, made)
    add_examples(graph)
    settle_fills(graph)
    graph.lint()
    recurrences = tuple(made if each.name == first.name else each for each in found.recurrences)
    return replace(found, outer=graph, recurrences=tuple(r for r in recurrences if r.name != second.name))


def _lag(after: fx.Node, second: Recurrence, rows: dict[fx.Node, Rows | str], steps: int) -> Lag:
    """How the steps of two loops stand to each other, read off the slices that the second reads of the first."""
    reads = [(x, after.args[x.operand]) for x in second.xs if isinstance(x, Slices)]
    lags, start, stop = set(), 0, second.steps
    for x, source in reads:
        found = rows.get(source)  # type: ignore[arg-type]
        if found is None:
            continue
        if isinstance(found, str):
            raise Illegal(found)
        if x.dim != found.dim or found.inner != 1:
            raise Illegal("the second does not go along the time of the first")
        if x.stride != 1:
            raise Illegal("the second reads the steps of the first in another order")
        lags.add(x.start - found.shift)
        start, stop = max(start, found.first - x.start), min(stop, found.last - x.start)
    if len(lags) > 1:
        raise Illegal("a step of the second needs several steps of the first")
    if not lags:
        raise Illegal(next((text for node in after.args if isinstance(text := rows.get(node), str) and text), ""))  # type: ignore[arg-type]
    lag = lags.pop()
    if max(start, second.steps - stop, start + lag, steps - stop - lag) > _PEELED or stop <= start:
        raise Illegal("they do not run over the same steps")
    return Lag(lag, start, stop)


def _check_modes(
    graph: fx.Graph, before: fx.Node, after: fx.Node, first: Recurrence, second: Recurrence, found: Capture
) -> None:
    """Both steps run in the modes of the first loop, and random numbers are drawn in the order of the user's code."""
    if (first.grad_enabled, first.autocast) != (second.grad_enabled, second.autocast):
        raise Illegal("they run in different gradient or autocast modes")
    for each in (first, second):
        inside = modes(list(each.step.graph.nodes))
        if inside[0] != inside[-1]:
            raise Illegal(f"the gradient or autocast mode changes between the steps at {each.where}")
    if first.random and second.random:
        raise Illegal("both draw random numbers, of which the first has all of its steps' before the second")
    order = {node: index for index, node in enumerate(graph.nodes)}
    random = {each.name for each in found.recurrences if each.random}
    for node in graph.nodes:
        between = order[before] < order[node] < order[after]
        if between and second.random and (is_random(node) or node.target in random):
            raise Illegal(f"the second draws random numbers, and so does {where(node)} before it")


def _check_values(before: fx.Node, after: fx.Node, first: Recurrence, rows: Mapping[fx.Node, Rows | str]) -> None:
    """Who reads one row of what the program has as one value gives all that is in it a gradient, if only of zeros. One
    loop gives none to the items that later steps of the first read."""
    items = {operand for x in first.xs if isinstance(x, Items) for operand in x.operands}
    needing = any(first.examples[operand].requires_grad for operand in items)
    singly = any(user.target is torch.unbind for pick in after.users for user in pick.users)
    between = ancestors(after.all_input_nodes, [before]).intersection(rows) if needing and singly else ()
    if any(node.meta.get(COLLECTED) == STACK for node in between):
        raise Illegal("the second reads a stack of what the first makes of values of each step, and gives its own rows")


def _forward(graph: fx.Graph, rows: dict[fx.Node, Rows | str]) -> None:
    """Who reads one row that is not made in the loop gets that row, not all of them."""
    made_rows = timed(rows)
    for node in list(graph.nodes):
        source, dim, at = row_read(node)
        found = made_rows.get(source) if source is not None else None
        if source is None or found is None or found.dim != dim or found.inner != 1:
            continue
        at %= found.length
        if found.first <= at < found.last:
            continue
        with graph.inserting_before(source.next):
            made = outer_emitter(graph, made_rows).row(source, at)
        node.replace_all_uses_with(made)
    drop_dead(graph)
