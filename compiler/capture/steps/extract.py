"""From a region of the normal form to a ``Recurrence``, and its call in the graph around it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.capture.folded import Gapped
from reroll.capture.steps.modules import modules_of
from reroll.capture.steps.node_hash import Likeness
from reroll.capture.steps.numbers import draw_with_rate, filled, fills, is_rate, promoted
from reroll.capture.steps.operands import Carried, Inner, ItemsOf, Moving, Operand
from reroll.capture.steps.outer import Outer
from reroll.capture.steps.step import SliceOf, Step, tensor_of
from reroll.graph.editing import add_input, drop_dead, flatten, merge_duplicates, rebuild
from reroll.graph.effects import attribute, autocasts, example, grad_enabled, is_random
from reroll.graph.fakes import contiguous, resized
from reroll.graph.lines import take_line, where_all
from reroll.graph.names import names_of
from reroll.recurrence import Items, Numbers, PerStep, Recurrence, Slices


@dataclass(frozen=True, slots=True)
class Fixed:
    """An input that is the same at every step: a node of the old graph, or the content of an attribute."""

    value: fx.Node | str


Key = SliceOf | ItemsOf | Moving | Fixed
"""What identifies an input of a step."""


def extract(outer: Outer, step: Step, name: str) -> Recurrence:
    """Emit one recurrence into the outer graph, as a call of module ``name``, and give it."""
    for place in step.invariant:
        for r in range(1, step.region.steps):
            outer.repeated[step.node(place, r)] = step.node(place, 0)
        outer.hoist(step.node(place, 0))
    for row, place, _ in step.missing():
        if place in step.invariant:
            outer.repeated[row] = step.node(place, 0)
    builder = _Builder(outer, step)
    module = builder.build()
    operands = [outer.hoist(node) for register in step.registers for node in register.initial] + list(builder.numbers)
    call = outer.graph.call_module(name, tuple(operands))
    first = step.node(0, 0)
    take_line(call, first)
    _place_results(outer, step, builder, call)
    mode, blocks = step.sequence.modes[step.region.start], step.sequence.likeness >= Likeness.WEIGHTS
    return Recurrence(
        name=name,
        step=module,
        steps=step.count,
        carries=tuple(node.name for carries in builder.carries for node in carries),
        xs=tuple(builder.xs),
        constants=tuple(builder.constants),
        ys=(*(step.node(place, 0).name for place in step.ys), *(node.name for node in builder.unused)),
        examples=tuple(_examples(step, operands, builder)),
        autocast=autocasts(mode),
        grad_enabled=grad_enabled(mode),
        random=any(is_random(node) for node in module.graph.nodes),
        blocks=blocks,
        modules=modules_of(step.sequence.module.graph, operands, builder.xs, step.count) if blocks else (),
        where=where_all([step.node(place, 0) for place in range(step.region.period)]),
    )


def _place_results(outer: Outer, step: Step, builder: _Builder, call: fx.Node) -> None:
    """Say where in the outer graph the last carries and the stacked outputs of a call are found."""
    starts = [sum(len(r.initial) for r in step.registers[:i]) for i in range(len(step.registers))]
    for (place, r), (register, ago) in step.finals.items():
        old = step.node(place, r)
        last = outer.graph.call_function(operator.getitem, (call, starts[register] + ago))
        last.meta["example_value"] = example(old)
        outer.env[old] = outer.as_it_lies(last)
    for index, place in enumerate(step.ys):
        stacked = outer.graph.call_function(operator.getitem, (call, builder.offset + index))
        rows = step.rows(place)
        value, needs = example(rows[0][0]), any(_needs(example(row)) for row, _ in rows)  # the first may need none
        assert value is not None
        stacked.meta["example_value"] = resized(value, (step.count, *value.shape)).requires_grad_(needs)
        outer.emitted |= {row: (stacked, number) for row, number in rows}
        outer.emitted |= {row: (stacked, number) for row, of, number in step.missing() if of == place}


def _examples(step: Step, operands: list[fx.Node], builder: _Builder) -> Iterator[torch.Tensor]:
    """An example of each operand; the items of a list have one layout, and all need gradients if any does."""
    values = [tensor_of(step.sequence, node) for node in operands]
    lists = [x.operands for x in builder.xs if isinstance(x, Items)]
    needs = {i for items in lists if any(_needs(values[j]) for j in items) for i in items}
    loose = {*range(builder.offset), *(i for items in lists for i in items)}
    for index, value in enumerate(values):
        assert value is not None
        like = contiguous(value) if index in loose else value
        yield like.detach().requires_grad_() if index in needs and not like.requires_grad else like


def _needs(value: torch.Tensor | None) -> bool:
    return value is not None and value.requires_grad


class _Builder:
    """Builds the step's graph, and collects the operands that its recurrence is called on."""

    def __init__(self, outer: Outer, step: Step) -> None:
        self.outer, self.step = outer, step
        self.offset = sum(len(register.initial) for register in step.registers)
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.numbers: dict[fx.Node, int] = {}
        self.carries: list[list[fx.Node]] = []
        self.xs: list[PerStep] = []
        self.constants: list[int] = []
        self.unused: list[fx.Node] = []
        self.inputs: dict[Key, fx.Node] = {}
        self.values: dict[int, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        """The step: carries, then per-step inputs, then constants; next carries, then outputs."""
        places = [place for place in range(self.step.region.period) if place not in self.step.invariant]
        for register in self.step.registers:
            name = f"carry_{self.step.node(register.place, 0).name}"
            names = [name, *(f"{name}_ago{ago}" for ago in range(2, len(register.initial) + 1))]
            likes = map(example, register.initial)
            self.carries.append([add_input(self.graph, *each) for each in zip(names, likes, strict=True)])
        reads = dict(read for place in places for read in self._reads(place))
        per_step = [key for key in reads if not isinstance(key, Fixed)]
        for key in dict.fromkeys((*per_step, *reads)):
            self.inputs[key] = self._add(key, reads[key])
        for place in places:
            self.values[place] = self._emit(place)
        self._keep_unused_random()
        self.graph.output(tuple(self._results()))
        merge_duplicates(self.graph)
        drop_dead(self.graph)
        return fx.GraphModule(self.root, self.graph)

    def _keep_unused_random(self) -> None:
        """A random number that nobody uses is drawn all the same, for those after it; nothing of it is an output."""
        for node, value in [*self._unused_random()]:
            flat = self.graph.call_method("reshape", (self.graph.call_method("detach", (node,)), -1))
            self.unused.append(self.graph.call_function(torch.narrow, (flat, 0, 0, 0)))
            self.unused[-1].meta["example_value"] = value.detach().reshape(-1)[:0]

    def _unused_random(self) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """What draws, and what it gives, where nobody uses that; of a function with several results each of those."""
        given = set(self._results())
        for node in [node for node in self.graph.nodes if is_random(node)]:
            made = node.meta.get("example_value")
            if isinstance(made, torch.Tensor) and not node.users:
                yield node, made
            if isinstance(made, tuple | list):
                used = {pick.args[1] for pick in node.users if pick.users or pick in given}
                for at in (at for at, each in enumerate(made) if isinstance(each, torch.Tensor) and at not in used):
                    yield self.graph.call_function(operator.getitem, (node, at)), made[at]

    def _results(self) -> Iterator[fx.Node]:
        for register, carries in zip(self.step.registers, self.carries, strict=True):
            yield self.values[register.place]
            yield from carries[:-1]
        for place in self.step.ys:
            yield self.values[place]
        yield from self.unused

    def _reads(self, place: int) -> Iterator[tuple[Key, fx.Node | None]]:
        """(key, old node) of every input that a node of the step reads, but for carries."""
        sliced = self.step.slice_of(place)
        if sliced is not None:
            yield sliced, self.step.node(place, 0)
            return
        for operand in self.step.operands[place]:
            if (read := self._input(operand)) is not None:
                yield read

    def _input(self, operand: Operand) -> tuple[Key, fx.Node | None] | None:
        """(key, old node) of an operand that is an input; None for carries, values of the step and literals."""
        match operand:
            case Moving():
                return operand, None
            case ItemsOf(nodes, _):
                return operand, nodes[0]
        node = self.step.fixed(operand)
        if node is None:
            return None
        return Fixed(self.step.sequence.content(node) if node.op == "get_attr" else node), node

    def _operand(self, node: fx.Node) -> int:
        """The number of an operand behind the initial carries."""
        return self.offset + self.numbers.setdefault(node, len(self.numbers))

    def _add(self, key: Key, source: Any) -> fx.Node:
        match key:
            case Fixed():
                return self._add_constant(source)
            case Moving(values):
                self.xs.append(Numbers(values))
                return add_input(self.graph, f"x_number{len(self.xs)}", None)
            case SliceOf(base, dim, start, stride):
                self.xs.append(Slices(self._operand(self.outer.hoist(base)), dim, start, stride))
            case ItemsOf():
                self.xs.append(self._items(key))
        return add_input(self.graph, f"x_{source.name}", example(source), names_of(source))

    def _items(self, items: ItemsOf) -> PerStep:
        """How values from outside are read one at each step: as rows of one tensor where they are that."""
        nodes = items.nodes
        if (run := self.outer.run_of(nodes, items.steps)) is not None:
            return Slices(self._operand(run[0]), 0, run[1], run[2])
        if len(nodes) < self.step.count:
            raise Gapped
        if self.step.sequence.maps and (stacked := self.outer.stacked(nodes)) is not None:
            return Slices(self._operand(stacked), 0, 0, 1)
        return Items(tuple(self._operand(self.outer.hoist(old)) for old in nodes))

    def _add_constant(self, source: fx.Node) -> fx.Node:
        if source.op == "get_attr":
            value = attribute(self.step.sequence.module, source)
            if isinstance(value, torch.nn.Module):
                self.root.add_module(source.name, value)
                return self.graph.get_attr(source.name)
        self.constants.append(self._operand(self.outer.hoist(source)))
        return add_input(self.graph, source.name, example(source), names_of(source))

    def _emit(self, place: int) -> fx.Node:
        node, operands = self.step.node(place, 0), self.step.operands[place]
        sliced = self.step.slice_of(place)
        if sliced is not None:
            return self.inputs[sliced]
        number = next((operand for operand in operands if isinstance(operand, Moving)), None)
        if number is not None and fills(node):
            return filled(self.graph, node, self.inputs[number])
        leaves = self.step.sequence.operands[self.step.region.start + place]
        new = [self._leaf(leaf, operand) for leaf, operand in zip(leaves, operands, strict=True)]
        if number is not None and is_rate(node, operands.index(number)):
            return draw_with_rate(self.graph, node, new)
        if number is not None:
            new = self._settled(node, new, number)
        args, kwargs = rebuild(node, new)
        target: Any = "reshape" if node.target == "view" and _sizes(node) else node.target
        made = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        return made

    def _settled(self, node: fx.Node, leaves: list[Any], number: Moving) -> list[Any]:
        """A number that is a tensor promotes unlike a Python number: cast it where the result would differ."""
        at = next(i for i, leaf in enumerate(leaves) if leaf is self.inputs[number])
        like = next(value for leaf in flatten(node) if (value := example(leaf)) is not None)
        leaves[at] = promoted(self.graph, leaves[at], Numbers(number.values).dtype, like, number.values[0])
        return leaves

    def _leaf(self, leaf: Any, operand: Operand) -> Any:
        if (read := self._input(operand)) is not None:
            return self.inputs[read[0]]
        match operand:
            case Inner(place):
                return self.values[place]
            case Carried():
                return self._carried(operand)
        return leaf

    def _carried(self, operand: Carried) -> fx.Node:
        for register, carries in zip(self.step.registers, self.carries, strict=True):
            if register.place == operand.place and register.initial[: operand.delay] == operand.initial:
                return carries[operand.delay - 1]
        raise AssertionError("every carried operand has a register")


def _sizes(node: fx.Node) -> bool:
    """Whether a view changes sizes, not the dtype: as a reshape it takes a carry of any layout."""
    return node.op == "call_method" and not any(isinstance(x, torch.dtype) for x in flatten(node)) and not node.kwargs
