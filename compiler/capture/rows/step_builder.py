"""Two recurrences over the same steps as one: its step is the first one's step, and then the second one's."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from reroll.capture.rows.peel import RowEmitter
from reroll.capture.rows.row_analysis import Illegal
from reroll.capture.rows.row_rules import Rows
from reroll.graph.editing import add_input, drop_dead, merge_duplicates
from reroll.graph.effects import example
from reroll.graph.fakes import resized
from reroll.graph.lines import take_line
from reroll.graph.names import add_names, names_of
from reroll.recurrence import Items, PerStep, Recurrence, Slices


@dataclass
class StepBuilder:
    """A step while it is built, and the operands that its recurrence is called on behind the initial carries.

    ``stride`` is by how many rows what is read of values from outside moves at each step.
    """

    offset: int
    stride: int = 1
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    operands: list[fx.Node] = field(default_factory=list)
    examples: list[torch.Tensor] = field(default_factory=list)
    xs: list[tuple[PerStep, fx.Node]] = field(default_factory=list)
    constants: list[tuple[int, fx.Node]] = field(default_factory=list)

    def placeholder(self, name: str, like: torch.Tensor | None, names: tuple[str, ...] = ()) -> fx.Node:
        """An input of the step; ``build`` moves it to its place."""
        return add_input(self.graph, name, like, names)

    def operand(self, node: fx.Node, like: torch.Tensor | None) -> int:
        """The number of an operand; the same one for the same value."""
        if like is None:
            raise Illegal(f"the second needs {node.name}, which is no tensor")
        for index, (known, value) in enumerate(zip(self.operands, self.examples, strict=True)):
            if known is node and value.requires_grad == like.requires_grad:
                return self.offset + index
        self.operands.append(node)
        self.examples.append(like)
        return self.offset + len(self.operands) - 1

    def carries(self, recurrence: Recurrence) -> dict[fx.Node, fx.Node]:
        """New inputs for the carries of a step."""
        olds, _, _ = recurrence.inputs
        return {old: self.placeholder(old.name, example(old)) for old in olds}

    def inputs(self, call: fx.Node, recurrence: Recurrence, left_out: Container[int]) -> dict[fx.Node, fx.Node]:
        """New inputs for the old ones of a step, but for its carries and the per-step inputs that are left out."""
        _, xs, constants = recurrence.inputs
        made: dict[fx.Node, fx.Node] = {}

        def number(index: int) -> int:
            return self.operand(call.args[index], recurrence.examples[index])  # type: ignore[arg-type]

        for place, (x, old) in enumerate(zip(recurrence.xs, xs, strict=True)):
            if place not in left_out:
                if isinstance(x, Slices):
                    x = replace(x, operand=number(x.operand))
                elif isinstance(x, Items):
                    x = Items(tuple(number(index) for index in x.operands))
                made[old] = self.placeholder(old.name, example(old), names_of(old))
                self.xs.append((x, made[old]))
        for index, old in zip(recurrence.constants, constants, strict=True):
            made[old] = self.placeholder(old.name, example(old), names_of(old))
            self.constants.append((number(index), made[old]))
        return made

    def spread(self, source: fx.Node, dim: int, at: int, inner: int) -> fx.Node:
        """One row of a value from outside, with its time dimension: it becomes a per-step input."""
        if inner > 1:
            return self._entries(source, dim, at, inner)
        value = example(source)
        x = Slices(self.operand(source, value), dim, at, self.stride)
        row = None if value is None else value.select(dim, 0).detach().requires_grad_(value.requires_grad)
        node = self.placeholder(f"x_{source.name}", row)
        self.xs.append((x, node))
        return self.graph.call_function(torch.unsqueeze, (node, dim))

    def _entries(self, source: fx.Node, dim: int, at: int, inner: int) -> fx.Node:
        """The ``inner`` entries of one row, in a dimension that holds those of all rows one after another."""
        value = example(source)
        if value is None:
            raise Illegal(f"{source.name} is no tensor")
        sizes = (*value.shape[:dim], value.shape[dim] // inner, inner, *value.shape[dim + 1 :])
        with source.graph.inserting_after(source):
            apart = source.graph.call_function(torch.unflatten, (source, dim, (-1, inner)))
        apart.meta["example_value"] = resized(value, sizes).requires_grad_(value.requires_grad)
        take_line(apart, source)
        like = apart.meta["example_value"]
        row = like.select(dim, 0).detach().requires_grad_(value.requires_grad)
        node = self.placeholder(f"x_{source.name}", row)
        self.xs.append((Slices(self.operand(apart, like), dim, at, self.stride), node))
        return node

    def constant(self, source: fx.Node) -> fx.Node:
        """A value from outside that is the same at every step."""
        number = self.operand(source, example(source))
        known = [node for index, node in self.constants if index == number]
        if not known:
            known = [self.placeholder(source.name, example(source))]
            self.constants.append((number, known[0]))
        return known[0]

    def body(self, module: fx.GraphModule, inputs: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
        """Copy a step; give its results."""
        env = dict(inputs)
        for node in module.graph.find_nodes(op="get_attr"):
            env[node] = self.graph.get_attr(self._attribute(str(node.target), getattr(module, str(node.target))))
            env[node].meta = dict(node.meta)
        results: Any = self.graph.graph_copy(module.graph, env)
        return list(results)

    def _attribute(self, name: str, value: torch.nn.Module) -> str:
        while getattr(self.root, name, value) is not value:
            name += "_"
        self.root.add_module(name, value)
        return name

    def build(self, carries: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
        """The step: carries, then per-step inputs, then constants; then its results."""
        self.graph.output(tuple(results))
        front = next(iter(self.graph.nodes))
        inputs = [*carries, *(node for _, node in self.xs), *(node for _, node in self.constants)]
        for node in inputs:
            if node is front:
                front = node.next
            else:
                front.prepend(node)
        merge_duplicates(self.graph)
        drop_dead(self.graph)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def extend(
        self, call: fx.Node, recurrence: Recurrence, carries: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> Recurrence:
        """The recurrence with this step and its operands in place of its own; its call is changed."""
        width = len(carries)
        call.args = (*call.args[:width], *self.operands)
        return replace(
            recurrence,
            step=self.build(carries, results),
            carries=tuple(node.name for node in carries),
            xs=tuple(x for x, _ in self.xs),
            constants=tuple(number for number, _ in self.constants),
            ys=tuple(node.name for node in results[width:]),
            examples=(*recurrence.examples[:width], *self.examples),
        )


def merge(
    before: fx.Node, after: fx.Node, first: Recurrence, second: Recurrence, rows: Mapping[fx.Node, Rows]
) -> tuple[Recurrence, list[fx.Node]]:
    """The recurrence that does both, called in place of the first, and what must be made before its call.

    Both have as many steps, and step t of the second reads row t of the first.
    """
    wide = len(first.carries)
    width = wide + len(second.carries)
    step = StepBuilder(width)
    carries = [step.carries(first), step.carries(second)]
    inner = {i for i, x in enumerate(second.xs) if isinstance(x, Slices) and after.args[x.operand] in rows}
    env = [carries[0] | step.inputs(before, first, ()), carries[1] | step.inputs(after, second, inner)]
    given = step.body(first.step, env[0])
    emitter = RowEmitter(step.graph, rows, lambda node, _: given[_index(node)], step.spread, step.constant)
    _, olds, _ = second.inputs
    for place in inner:
        x: Any = second.xs[place]
        source: Any = after.args[x.operand]
        env[1][olds[place]] = given[_index(source)] if source.args[0] is before else emitter.row(source, x.start)
        add_names(env[1][olds[place]], names_of(olds[place]))
    made = step.body(second.step, env[1])
    ends = [*given[:wide], *made[: width - wide]]
    ys = [*given[wide:], *made[width - wide :]]
    _reconnect(before, after, wide, width, len(given) - wide)
    before.args = (*before.args[:wide], *after.args[: width - wide])
    both = replace(
        first,
        examples=(*first.examples[:wide], *second.examples[: width - wide]),
        peeled=first.peeled + second.peeled,
        left=max(first.left, second.left),
        within=first.within or second.within,
        dropped=first.dropped or second.dropped,
        random=first.random or second.random,
        where=f"{first.where}; {second.where}",
        kept=first.kept_rows + second.kept_rows,
    )
    after.graph.erase_node(after)
    fused = step.extend(before, both, [*carries[0].values(), *carries[1].values()], [*ends, *ys])
    return fused, list(before.all_input_nodes)


def _index(node: fx.Node) -> int:
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _reconnect(before: fx.Node, after: fx.Node, wide: int, width: int, ys: int) -> None:
    """Who reads results of either recurrence reads them of the fused one."""
    for pick in list(before.users):
        if pick.target is operator.getitem and _index(pick) >= wide:
            pick.args = (before, _index(pick) + width - wide)
    for pick in list(after.users):
        index = _index(pick)
        pick.args = (before, index + (wide if index < width - wide else wide + ys))


def prune(call: fx.Node, recurrence: Recurrence) -> Recurrence:
    """The recurrence without outputs that nobody reads; those that stand for random numbers stay."""
    carried = len(recurrence.carries)
    results: Any = recurrence.step.graph.output_node().args[0]
    read = {_index(pick) for pick in call.users}
    kept = [i for i, node in enumerate(results) if i < carried or i in read or _stands_for_random(node, recurrence)]
    if len(kept) == len(results):
        return recurrence
    for pick in list(call.users):
        pick.args = (call, kept.index(_index(pick)))
    graph = fx.Graph()
    copies: Any = graph.graph_copy(recurrence.step.graph, {})
    graph.output(tuple(copies[i] for i in kept))
    drop_dead(graph)
    rows = tuple(recurrence.kept_rows[i - carried] for i in kept[carried:])
    names = tuple(copies[i].name for i in kept[carried:])
    return replace(recurrence, step=fx.GraphModule(recurrence.step, graph), ys=names, kept=rows)


def _stands_for_random(node: fx.Node, recurrence: Recurrence) -> bool:
    value = example(node)
    return recurrence.random and (value is None or value.numel() == 0)
