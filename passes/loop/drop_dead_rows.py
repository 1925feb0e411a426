"""Where only every k-th row of an output is read, or only those from some row on, the loop gives no others.

``y[::4]``, ``readout(y)[50:]`` and ``y.transpose(0, 1)[:, 3::4]`` are examples. The step makes the rows of all steps,
as the next step needs what they are made of, but those that nobody reads are not held, and what is done row by row
before they are left out is done on the others alone.

A row that is left out gets zeros for its gradient, as the slice gives it in eager. What is done with such a row in
eager, and not here, hands on zeros there, too, unless its derivative is infinite: ``sqrt(y)[::4]`` has 0 * inf, which
is no number, where y is 0 in a row that is left out. Here the gradient stays zero, as in ``take_last``.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from reroll.capture.normal.selects import as_tuple
from reroll.capture.rows.hoist import copy_with_examples
from reroll.capture.rows.row_analysis import Illegal, is_pick, rows_of, timed
from reroll.capture.rows.row_rules import Rows, argument, shape
from reroll.graph.effects import example, modes, operation, spelled
from reroll.graph.inplace import out_of_place
from reroll.graph.lines import take_line
from reroll.passes.loop.rewrite import rewritten, where_legal
from reroll.program.registry import register_pass
from reroll.recurrence import Capture, Items, Recurrence, RowSteps

_NEVER_EMPTY = ("pixel_shuffle", "pixel_unshuffle")  # torch 2.13 does not reverse these on no rows


@register_pass("drop-dead-rows", on="loops")
def drop_dead_rows(loops: Capture, /) -> Capture:
    """Have loops give those rows alone that are read. Passes behind this one do not follow these."""
    return where_legal(loops, _look, _taken)


@dataclass(frozen=True, slots=True)
class _Read:
    """A slice over time: the step of the first row that it takes, which is negative where that is made before the loop,
    how many steps are from one row to the next, and what the index does besides, without time."""

    first: int
    every: int
    rest: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Fewer:
    """What is made of some rows alone: ``moved`` are outputs of a recurrence and what follows from these row by row,
    each with those of its rows that stay, ``reads`` the slices that read them."""

    call: fx.Node
    rows: Mapping[fx.Node, Rows]
    moved: Mapping[fx.Node, RowSteps]
    reads: Mapping[fx.Node, _Read]


def _look(graph: fx.Graph, recurrence: Recurrence) -> _Fewer:
    """What can be made of some rows alone. Raises Illegal where nothing can."""
    call = next(node for node in graph.nodes if node.target == recurrence.name)
    rows = timed(rows_of(graph, call, recurrence))
    mode = dict(zip(graph.nodes, modes(list(graph.nodes)), strict=False))
    found = {node: _read(node, rows, recurrence.steps) for node in graph.nodes if mode.get(node) == mode[call]}
    reads = {node: read for node, read in found.items() if read is not None}
    moved = dict[fx.Node, RowSteps]()
    for number in range(len(recurrence.carries), len(recurrence.carries) + len(recurrence.ys)):
        picks = [user for user in call.users if user.args[1] == number]
        behind = _row_chain(picks, rows, reads)
        readers = {user for node in behind for user in node.users if user not in behind}
        if not readers or not readers <= reads.keys():
            continue
        first, *others = [(reads[reader].first, reads[reader].every) for reader in readers]
        if any(other != first for other in others):
            continue
        kept = {node: _kept(rows[node], *first) for node in behind}
        if all(node in picks or _on_fewer(node, rows, recurrence.steps, kept[node]) for node in behind):
            moved |= kept
    if not moved:
        raise Illegal("all rows are read, or not the same ones by all readers")
    return _Fewer(call, rows, moved, {node: read for node, read in reads.items() if node.args[0] in moved})


def _read(node: fx.Node, rows: Mapping[fx.Node, Rows], steps: int) -> _Read | None:
    """What a slice over time that is open at its end reads of a value with a row of each step."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    found = rows.get(source) if isinstance(source, fx.Node) and example(source) is not None else None
    if found is None or not _of_each_step(found, steps):
        return None
    items = as_tuple(node.args[1], len(shape(source)))
    if items is None:
        return None
    at = [place for place, item in enumerate(items) if item is not None][found.dim]
    item = items[at]
    if not isinstance(item, slice) or item.stop is not None:
        return None
    first, every = item.start or 0, 1 if item.step is None else item.step
    if first < 0 or every < 1 or RowSteps(first, every).whole:
        return None
    rest = (*items[:at], slice(None), *items[at + 1 :])
    return _Read(first - found.shift, every, rest)


def _kept(rows: Rows, first: int, every: int) -> RowSteps:
    """The rows of a value that stay where every ``every``-th one from that of step ``first`` on is read."""
    return RowSteps(first_from(-rows.shift, first, every), every)


def _of_each_step(rows: Rows, steps: int) -> bool:
    """Whether there is a row of each step; there may be some before and behind."""
    return rows.inner == 1 and rows.first == rows.shift and rows.last - rows.first == steps


def _row_chain(
    picks: Iterable[fx.Node], rows: Mapping[fx.Node, Rows], reads: Mapping[fx.Node, _Read]
) -> dict[fx.Node, None]:
    """An output, and what follows from it row by row before it is read."""
    behind = dict.fromkeys(picks)
    todo = [*behind]
    while todo:
        new = [user for user in todo.pop().users if user in rows and user not in reads and user not in behind]
        behind |= dict.fromkeys(new)
        todo += new
    return behind


def _on_fewer(node: fx.Node, rows: Mapping[fx.Node, Rows], steps: int, kept: RowSteps) -> bool:
    """Whether an operation does on some rows, with the arguments that it has, what it does on all."""
    if not _of_each_step(rows[node], steps):
        return False
    if kept.first and spelled(node) in _NEVER_EMPTY:
        return False
    if rows[node].passes is not None:
        return operation(node).rows == "cat"
    return rows[node].sizes is None or _without_sizes(node, rows)


def _without_sizes(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether the arguments of a view hold no sizes, and it does not ask whether there is one row."""
    name, source = spelled(node), node.all_input_nodes[0]
    if name != "squeeze":
        return name in ("unsqueeze", "flatten")
    dim, rank = argument(node, 1, "dim"), len(shape(source))
    return isinstance(dim, int) and dim % rank != rows[source].dim


def _taken(found: Capture, recurrence: Recurrence) -> Capture:
    graph = copy_with_examples(found.outer)
    fewer, kept = _look(graph, recurrence), list(recurrence.kept_rows)
    operands = _Operands(fewer)
    for node in [node for node in graph.nodes if node in fewer.moved]:
        if is_pick(node, fewer.call):
            kept[node.args[1] - len(recurrence.carries)] = fewer.moved[node]
        else:
            operands.put(node)
    for node, each in fewer.moved.items():
        _shrink(node, fewer.rows[node].dim, each)
    changed = {*fewer.moved, *(_pass_on(node, read) for node, read in fewer.reads.items())}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if sources and [*node.args[:1]] == sources and sources[0] in changed and node not in changed and _view(node):
            changed.add(node)
    others = tuple(each if each is recurrence else _as_it_lies(graph, each, changed) for each in found.recurrences)
    made = replace(recurrence, kept=tuple(kept))
    return rewritten(replace(found, recurrences=others), graph, fewer.call, recurrence, made)


def _view(node: fx.Node) -> bool:
    """Give a node that only views a value an example that lies as that does now; whether it is such a node."""
    value, old = example(node.args[0]), example(node)
    if value is None or old is None or operation(node).view not in ("turned", "sized", "part"):
        return False
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    made = function(value.detach(), *node.args[1:], **node.kwargs)
    node.meta["example_value"] = made.requires_grad_(old.requires_grad)
    return True


def _as_it_lies(graph: fx.Graph, recurrence: Recurrence, changed: Container[fx.Node]) -> Recurrence:
    """A recurrence with examples like those of its operands that were changed: into the layout of a slice of all rows,
    which has gaps, they would be copied. Carries, and the items of lists, are contiguous in any case."""
    call, examples = next(node for node in graph.nodes if node.target == recurrence.name), [*recurrence.examples]
    as_it_is = {*range(len(recurrence.carries))}.union(*(x.operands for x in recurrence.xs if isinstance(x, Items)))
    for number, node in enumerate(call.args):
        if node in changed and number not in as_it_is:
            value = example(node)
            assert value is not None
            examples[number] = value.detach().requires_grad_(examples[number].requires_grad)
    return replace(recurrence, examples=tuple(examples))


@dataclass(slots=True)
class _Operands:
    """Gives operations the same rows of what they read besides; ``made``: by value, dimension and rows."""

    fewer: _Fewer
    made: dict[tuple[fx.Node, int, RowSteps], fx.Node] = field(default_factory=dict)

    def put(self, node: fx.Node) -> None:
        """Let an operation read no other rows than those that it is to give."""
        moved, rows = self.fewer.moved, self.fewer.rows
        if rows[node].passes is not None:
            self._join(node)
            return
        dims = dict(rows[node].spread)
        dims |= {each: rows[each].dim for each in node.all_input_nodes if each in rows and each not in moved}

        def operand(each: fx.Node) -> fx.Node:
            return self._sliced(each, dims[each], node) if each in dims else each

        args = fx.map_arg(node.args, operand)
        if node.target is out_of_place:  # it views every entry of its operand once: what it does there, it does to all
            args = (args[0], args[1], ((),), *args[3:])
        node.args, node.kwargs = args, fx.map_arg(node.kwargs, operand)

    def _join(self, node: fx.Node) -> None:
        """Take the rows before and behind those of the loop that a cat is to give."""
        kept, dim, offset = self.fewer.moved[node], self.fewer.rows[node].dim, 0
        items: Any = node.args[0]
        made = []
        for item in items:
            made.append(item if item in self.fewer.moved else self._piece(node, item, dim, offset, kept))
            offset += shape(item)[dim]
        node.args = (made, *node.args[1:])

    def _piece(self, node: fx.Node, item: fx.Node, dim: int, offset: int, kept: RowSteps) -> fx.Node:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(rows_from, (item, dim, offset, kept.first, kept.every))
        there = RowSteps(first_from(offset, kept.first, kept.every), kept.every)
        return self._like(made, item, node, dim, there)

    def _sliced(self, source: fx.Node, dim: int, reader: fx.Node) -> fx.Node:
        kept = self.fewer.moved[reader]
        key = source, dim, kept
        if key not in self.made:
            index = (slice(None),) * dim + (slice(kept.first, None, kept.every),)
            with reader.graph.inserting_before(reader):
                made = reader.graph.call_function(operator.getitem, (source, index))
            self.made[key] = self._like(made, source, reader, dim, kept)
        return self.made[key]

    def _like(self, made: fx.Node, source: fx.Node, reader: fx.Node, dim: int, kept: RowSteps) -> fx.Node:
        value = example(source)
        assert value is not None
        made.meta["example_value"] = _with_rows(value, dim, kept)
        take_line(made, reader)
        return made


def rows_from(piece: torch.Tensor, dim: int, offset: int, first: int, every: int) -> torch.Tensor:
    """Those rows of a piece that are among every ``every``-th one from ``first`` on of a whole, in which the piece
    begins with row ``offset``: which these are may depend on the number of steps in another way than the offset does.
    """
    return piece[(slice(None),) * dim + (slice(first_from(offset, first, every), None, every),)]


def first_from(offset: int, first: int, every: int) -> int:
    """The first of every ``every``-th row from ``first`` on that is not before an offset, counted from there."""
    return first - offset if first >= offset else (first - offset) % every


def _shrink(node: fx.Node, dim: int, kept: RowSteps) -> None:
    """Give a node an example with fewer rows."""
    value = example(node)
    if value is not None:
        node.meta["example_value"] = _with_rows(value, dim, kept)


def _with_rows(value: torch.Tensor, dim: int, kept: RowSteps) -> torch.Tensor:
    """An example with fewer rows, which lie as what is made of fewer rows does."""
    steps, rows, step = value.shape[dim], kept.rows(value.shape[dim]), value.stride(dim)
    sizes = (*value.shape[:dim], rows, *value.shape[dim + 1 :])
    strides = [each // max(steps, 1) * max(rows, 1) if each > step else each for each in value.stride()]
    return value.new_empty_strided(sizes, strides).requires_grad_(value.requires_grad)


def _pass_on(node: fx.Node, read: _Read) -> fx.Node:
    """Give the readers of a slice what it was taken of, now that this has no other rows; what they are given."""
    made: Any = node.args[0]
    if any(item != slice(None) for item in read.rest):
        value = example(made)
        assert value is not None
        with node.graph.inserting_before(node):
            made = node.graph.call_function(operator.getitem, (made, read.rest))
        made.meta = dict(node.meta)
        made.meta["example_value"] = value[read.rest].detach().requires_grad_(value.requires_grad)
    node.replace_all_uses_with(made)
    return made  # type: ignore[no-any-return]
