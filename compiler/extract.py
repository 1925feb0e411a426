"""From a region of the normal form to a ``Recurrence``, and its call in the graph around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from reroll.detect import Operand, attribute, close_slices, open_slices
from reroll.functional import where
from reroll.normal import example, has_effect, is_random
from reroll.outer import Outer
from reroll.recurrence import Items, Numbers, PerStep, Recurrence, Slices
from reroll.region_step import Step


def extract(outer: Outer, step: Step, name: str) -> Recurrence:
    """Emit one recurrence into the outer graph, as a call of module ``name``, and give it."""
    builder = _Builder(outer, step)
    module = builder.build()
    operands = [outer.value(node) for register in step.registers for node in register.initial] + builder.operands
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
    scopes = _scopes(step)
    return Recurrence(
        name=name,
        step=module,
        steps=step.region.steps,
        carries=tuple(builder.carry_names),
        xs=tuple(builder.xs),
        constants=tuple(builder.constants),
        ys=tuple(step.node(place, 0).name for place in step.ys),
        examples=tuple(_example_of(step.sequence, node) for node in operands),
        autocast=scopes[0],
        grad_enabled=scopes[1],
        random=any(is_random(node) for node in module.graph.nodes),
        where=where(first),
    )


def _example_of(sequence: Sequence, node: fx.Node) -> torch.Tensor:
    value = example(node)
    if value is None:
        value = attribute(sequence.module, node)
    return value


def _scopes(step: Step) -> tuple[tuple[tuple[object, ...], ...], bool]:
    """Autocast regions that are open, and the gradient mode, where the region starts."""
    opened: dict[fx.Node, tuple[object, ...]] = {}
    grad = True
    for node in step.sequence.nodes[: step.region.start]:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            opened[node] = tuple(node.args)
        elif name == "_exit_autocast":
            opened.pop(node.args[0], None)  # type: ignore[arg-type]
        elif node.target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
    return tuple(opened.values()), grad


class _Builder:
    """Builds the step's graph, and collects the operands that its recurrence is called on."""

    def __init__(self, outer: Outer, step: Step) -> None:
        self.outer, self.step = outer, step
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.operands: list[fx.Node] = []
        self.xs: list[PerStep] = []
        self.constants: list[int] = []
        self.carry_names: list[str] = []
        self.inputs: dict[Any, fx.Node] = {}
        self.values: dict[int, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        """The step: carries, then per-step inputs, then constants; next carries, then outputs."""
        places = [place for place in range(self.step.region.period) if place not in self.step.invariant]
        for index, register in enumerate(self.step.registers):
            for ago, initial in enumerate(register.initial):
                name = f"carry_{self.step.node(register.place, 0).name}" + (f"_ago{ago + 1}" if ago else "")
                self.inputs["carry", index, ago] = self._placeholder(name, initial)
                self.carry_names.append(name)
        reads = dict(read for place in places for read in self._reads(place))
        for kind, make in (("x", self._add_x), ("constant", self._add_constant)):
            for key, source in reads.items():
                if key[0] == kind:
                    self.inputs[key] = make(key, source)
        for place in places:
            self.values[place] = self._emit(place)
        self.graph.output(tuple(self._results()))
        merge_duplicates(self.graph, self.step.sequence.content)
        self.graph.eliminate_dead_code(lambda node: has_effect(node))
        return fx.GraphModule(self.root, self.graph)

    def _results(self) -> Iterator[fx.Node]:
        for index, register in enumerate(self.step.registers):
            yield self.values[register.place]
            for ago in range(len(register.initial) - 1):
                yield self.inputs["carry", index, ago]
        for place in self.step.ys:
            yield self.values[place]

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
        node.meta["example_value"] = example(like)
        return node

    def _operand(self, node: fx.Node) -> int:
        """The number of an operand behind the initial carries."""
        if node not in self.operands:
            self.operands.append(node)
        return len(self.carry_names) + self.operands.index(node)

    def _add_x(self, key: Any, source: Any) -> fx.Node:
        if key[1] == "numbers":
            self.xs.append(Numbers(key[2]))
            return self.graph.placeholder(f"x_number{len(self.xs)}")
        if key[1] == "slices":
            base = self._operand(self._hoisted(key[2]))
            self.xs.append(Slices(base, key[3], key[4], key[5]))
        elif (run := self.outer.run_of(key[2])) is not None:
            self.xs.append(Slices(self._operand(run[0]), 0, run[1], run[2]))
        else:
            self.xs.append(Items(tuple(self._operand(self.outer.value(old)) for old in key[2])))
        return self._placeholder(f"x_{source.name}", source)

    def _add_constant(self, key: Any, source: fx.Node) -> fx.Node:
        if source.op == "get_attr":
            value = attribute(self.step.sequence.module, source)
            if isinstance(value, torch.nn.Module):
                self.root.add_module(source.name, value)
                return self.graph.get_attr(source.name)
        self.constants.append(self._operand(self._hoisted(source)))
        return self._placeholder(source.name, source)

    def _hoisted(self, old: fx.Node) -> fx.Node:
        """The outer value of a constant; loop-invariant work is done once, before the loop."""
        if old not in self.outer.env and old not in self.outer.emitted:
            for node in old.all_input_nodes:
                self._hoisted(node)
            self.outer.env[old] = self.outer.graph.node_copy(old, self.outer.value)
        return self.outer.value(old)

    def _emit(self, place: int) -> fx.Node:
        node = self.step.node(place, 0)
        if self.step.moves(place):
            return self.inputs[self._slice_key(place)]
        leaves, spec = tree_flatten((open_slices(node.args), open_slices(node.kwargs)))
        new = [self._leaf(leaf, operand) for leaf, operand in zip(leaves, self.step.operands[place], strict=True)]
        args, kwargs = close_slices(tree_unflatten(new, spec))
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        return made

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


def merge_duplicates(graph: fx.Graph, content: Callable[[fx.Node], str]) -> None:
    """Equal work of one step is done once: same operation, operands and submodules, no random numbers, no effects."""
    seen: dict[Any, fx.Node] = {}
    names: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr") or is_random(node) or has_effect(node):
            continue
        leaves, spec = tree_flatten((open_slices(node.args), open_slices(node.kwargs)))
        parts = [names.get(x, x) if isinstance(x, fx.Node) else (type(x), repr(x)) for x in leaves]
        key = (node.op, node.target, str(spec), tuple(parts), _scope(node))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def _scope(node: fx.Node) -> int:
    """How many changes of the gradient or autocast mode come before a node: work is only merged between them."""
    count, at = 0, node.prev
    while at.op != "root":
        count += at.op == "call_function" and (has_effect(at) and not is_random(at))
        at = at.prev
    return count
