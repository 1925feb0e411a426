"""From a region of the normal form to a ``Recurrence``, and its call in the graph around it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from reroll.capture.steps.colours import FILLS
from reroll.capture.steps.operands import Operand
from reroll.capture.steps.outer import Outer
from reroll.capture.steps.step import Step, tensor_of
from reroll.graph.editing import flatten, merge_duplicates, rebuild
from reroll.graph.effects import attribute, example, has_effect, is_random
from reroll.graph.lines import where
from reroll.graph.names import add_names, names_of
from reroll.recurrence import Items, Numbers, PerStep, Recurrence, Slices


def extract(outer: Outer, step: Step, name: str) -> Recurrence:
    """Emit one recurrence into the outer graph, as a call of module ``name``, and give it."""
    for place in step.invariant:
        for r in range(1, step.region.steps):
            outer.repeated[step.node(place, r)] = step.node(place, 0)
        outer.hoist(step.node(place, 0))
    builder = _Builder(outer, step)
    module = builder.build()
    operands = [outer.hoist(node) for register in step.registers for node in register.initial] + list(builder.numbers)
    call = outer.graph.call_module(name, tuple(operands))
    first = step.node(0, 0)
    call.meta["stack_trace"] = first.meta.get("stack_trace")
    carried = sum(len(register.initial) for register in step.registers)
    starts = [sum(len(r.initial) for r in step.registers[:i]) for i in range(len(step.registers))]
    for (place, r), (register, ago) in step.finals.items():
        old = step.node(place, r)
        outer.env[old] = outer.graph.call_function(operator.getitem, (call, starts[register] + ago))
        outer.env[old].meta["example_value"] = example(old)
    for index, place in enumerate(step.ys):
        stacked = outer.graph.call_function(operator.getitem, (call, carried + index))
        value = example(step.node(place, 0))
        assert value is not None
        rows = value.new_empty((step.region.steps, *value.shape))
        stacked.meta["example_value"] = rows.requires_grad_(value.requires_grad)
        for r in range(step.region.steps):
            outer.emitted[step.node(place, r)] = (stacked, r)
    grad_enabled, regions = step.sequence.modes[step.region.start]
    return Recurrence(
        name=name,
        step=module,
        steps=step.region.steps,
        carries=tuple(builder.carry_names),
        xs=tuple(builder.xs),
        constants=tuple(builder.constants),
        ys=(*(step.node(place, 0).name for place in step.ys), *(node.name for node in builder.unused)),
        examples=tuple(_examples(step, operands, builder)),
        autocast=tuple(arguments for region, arguments in regions if region == "_enter_autocast"),
        grad_enabled=grad_enabled and not any(region == "_enter_inference_mode" for region, _ in regions),
        random=any(is_random(node) for node in module.graph.nodes),
        where=where(first),
    )


def _examples(step: Step, operands: list[fx.Node], builder: _Builder) -> Iterator[torch.Tensor]:
    """An example of each operand; the items of a list have one layout, and all need gradients if any does."""
    values = [tensor_of(step.sequence, node) for node in operands]
    lists = [x.operands for x in builder.xs if isinstance(x, Items)]
    needs = {i for items in lists if any(_needs(values[j]) for j in items) for i in items}
    loose = {*range(len(builder.carry_names)), *(i for items in lists for i in items)}
    for index, value in enumerate(values):
        assert value is not None
        like = value
        if index in loose and not value.is_contiguous():
            like = value.new_empty(value.shape).requires_grad_(value.requires_grad)
        yield like.detach().requires_grad_() if index in needs and not like.requires_grad else like


def _needs(value: torch.Tensor | None) -> bool:
    return value is not None and value.requires_grad


class _Builder:
    """Builds the step's graph, and collects the operands that its recurrence is called on."""

    def __init__(self, outer: Outer, step: Step) -> None:
        self.outer, self.step = outer, step
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.numbers: dict[fx.Node, int] = {}
        self.xs: list[PerStep] = []
        self.constants: list[int] = []
        self.carry_names: list[str] = []
        self.unused: list[fx.Node] = []
        self.inputs: dict[Any, fx.Node] = {}
        self.values: dict[int, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        """The step: carries, then per-step inputs, then constants; next carries, then outputs."""
        places = [place for place in range(self.step.region.period) if place not in self.step.invariant]
        for index, register in enumerate(self.step.registers):
            for ago, initial in enumerate(register.initial):
                name = f"carry_{self.step.node(register.place, 0).name}" + (f"_ago{ago + 1}" if ago else "")
                self.inputs["carry", index, ago] = self._placeholder(name, initial)
                self.carry_names.append(self.inputs["carry", index, ago].name)
        reads = dict(read for place in places for read in self._reads(place))
        for kind, make in (("x", self._add_x), ("constant", self._add_constant)):
            for key, source in reads.items():
                if key[0] == kind:
                    self.inputs[key] = make(key, source)
        for place in places:
            self.values[place] = self._emit(place)
        self._keep_unused_random()
        self.graph.output(tuple(self._results()))
        merge_duplicates(self.graph)
        self.graph.eliminate_dead_code(has_effect)
        return fx.GraphModule(self.root, self.graph)

    def _keep_unused_random(self) -> None:
        """A random number that nobody uses is drawn all the same, for those after it; nothing of it is an output."""
        for node in [node for node in self.graph.nodes if is_random(node) and not node.users]:
            value = example(node)
            if value is not None:
                flat = self.graph.call_method("reshape", (self.graph.call_method("detach", (node,)), -1))
                self.unused.append(self.graph.call_function(torch.narrow, (flat, 0, 0, 0)))
                self.unused[-1].meta["example_value"] = value.detach().reshape(-1)[:0]

    def _results(self) -> Iterator[fx.Node]:
        for index, register in enumerate(self.step.registers):
            yield self.values[register.place]
            for ago in range(len(register.initial) - 1):
                yield self.inputs["carry", index, ago]
        for place in self.step.ys:
            yield self.values[place]
        yield from self.unused

    def _reads(self, place: int) -> Iterator[tuple[Any, fx.Node]]:
        """(key, old node) of every input that a node of the step reads, but for carries."""
        if self.step.moves(place):
            yield self._slice_key(place), self.step.node(place, 0)
            return
        for leaf, operand in zip(self._leaves(place), self.step.operands[place], strict=True):
            key = self._key(operand)
            if key is not None:
                inner = operand.kind == "step"
                yield key, self.step.node(operand.node, 0) if inner else operand.outside[0] if operand.outside else leaf

    def _leaves(self, place: int) -> list[Any]:
        return self.step.sequence.operands[self.step.region.start + place]

    def _slice_key(self, place: int) -> Any:
        index = self.step.operands[place][2]
        dim = self.step.node(place, 0).args[1]
        return ("x", "slices", self.step.moving_base(place), dim, index.start, index.stride)

    def _key(self, operand: Operand) -> Any:
        """What identifies an input of the step; None for carries, values of the step and literals."""
        if operand.kind == "constant":
            node = operand.outside[0]
            return ("constant", self.step.sequence.content(node) if node.op == "get_attr" else node)
        if operand.kind == "step" and operand.node in self.step.invariant:
            return ("constant", self.step.node(operand.node, 0))
        if operand.kind == "items":
            return ("x", "items", operand.outside)
        if operand.kind == "numbers":
            return ("x", "numbers", operand.values)
        return None

    def _placeholder(self, name: str, like: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.target = node.name
        node.meta["example_value"] = example(like)
        return node

    def _named_input(self, name: str, source: fx.Node) -> fx.Node:
        node = self._placeholder(name, source)
        add_names(node, names_of(source))
        return node

    def _operand(self, node: fx.Node) -> int:
        """The number of an operand behind the initial carries."""
        return len(self.carry_names) + self.numbers.setdefault(node, len(self.numbers))

    def _add_x(self, key: Any, source: Any) -> fx.Node:
        if key[1] == "numbers":
            self.xs.append(Numbers(key[2]))
            return self._placeholder(f"x_number{len(self.xs)}", None)
        if key[1] == "slices":
            base = self._operand(self.outer.hoist(key[2]))
            self.xs.append(Slices(base, key[3], key[4], key[5]))
        elif (run := self.outer.run_of(key[2])) is not None:
            self.xs.append(Slices(self._operand(run[0]), 0, run[1], run[2]))
        elif self.step.sequence.maps and (stacked := self.outer.stacked(key[2])) is not None:
            self.xs.append(Slices(self._operand(stacked), 0, 0, 1))
        else:
            self.xs.append(Items(tuple(self._operand(self.outer.hoist(old)) for old in key[2])))
        return self._named_input(f"x_{source.name}", source)

    def _add_constant(self, key: Any, source: fx.Node) -> fx.Node:
        if source.op == "get_attr":
            value = attribute(self.step.sequence.module, source)
            if isinstance(value, torch.nn.Module):
                self.root.add_module(source.name, value)
                return self.graph.get_attr(source.name)
        self.constants.append(self._operand(self.outer.hoist(source)))
        return self._named_input(source.name, source)

    def _emit(self, place: int) -> fx.Node:
        node = self.step.node(place, 0)
        if self.step.moves(place):
            return self.inputs[self._slice_key(place)]
        operands = self.step.operands[place]
        number = next((o for o in operands if o.kind == "numbers"), None)
        if number is not None and node.target in FILLS:
            return self._filled(node, self.inputs["x", "numbers", number.values])
        new = [self._leaf(leaf, operand) for leaf, operand in zip(self._leaves(place), operands, strict=True)]
        if number is not None:
            new = self._settled(node, new, number)
        args, kwargs = rebuild(node, new)
        target: Any = "reshape" if node.target == "view" and _sizes(node) else node.target
        made = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        return made

    def _filled(self, node: fx.Node, number: fx.Node) -> fx.Node:
        """A tensor filled with the number of the step."""
        value = example(node)
        assert value is not None
        cast = self.graph.call_method("to", (number,), {"dtype": value.dtype, "device": value.device})
        made = self.graph.call_method("expand", (cast, tuple(value.shape)))
        made.meta = dict(node.meta)
        return made

    def _settled(self, node: fx.Node, leaves: list[Any], number: Operand) -> list[Any]:
        """A number that is a tensor promotes unlike a Python number: cast it where the result would differ."""
        at = next(i for i, leaf in enumerate(leaves) if leaf is self.inputs["x", "numbers", number.values])
        like = example(flatten(node)[1 - at])
        assert like is not None
        leaves[at] = promoted(self.graph, leaves[at], Numbers(number.values).dtype, like, number.values[0])
        return leaves

    def _leaf(self, leaf: Any, operand: Operand) -> Any:
        key = self._key(operand)
        if key is not None:
            return self.inputs[key]
        if operand.kind == "step":
            return self.values[operand.node]
        return self.inputs["carry", *self._register(operand)] if operand.kind == "carry" else leaf

    def _register(self, operand: Operand) -> tuple[int, int]:
        known = tuple(reversed(operand.outside))
        for index, register in enumerate(self.step.registers):
            if register.place == operand.node and register.initial[: operand.delay] == known:
                return index, operand.delay - 1
        raise AssertionError("every carried operand has a register")


def _sizes(node: fx.Node) -> bool:
    """Whether a view changes sizes, not the dtype: as a reshape it takes a carry of any layout."""
    return node.op == "call_method" and not any(isinstance(x, torch.dtype) for x in flatten(node)) and not node.kwargs


def promoted(graph: fx.Graph, number: fx.Node, dtype: torch.dtype, like: torch.Tensor, value: float) -> fx.Node:
    """A number that is a tensor of ``dtype``, cast where it would promote ``like`` unlike the number ``value``."""
    same = torch.empty((1,) * min(like.dim(), 1), dtype=like.dtype)
    plain = torch.result_type(same, value)
    if torch.result_type(same, torch.tensor(0, dtype=dtype)) == plain:
        return number
    return graph.call_method("to", (number, plain))
