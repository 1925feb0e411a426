"""Writes new nodes into a graph: operations with their examples, whole bodies, and loops.

A *body* is the graph of one run of something that is called: ``(inputs...) -> (results...)``. It changes none of its
inputs but by ``copy_`` at its end, and its examples share memory with nothing outside, so its copies may share them.
A loop over a body is written as the call of a ``Recurrence``, or out, step by step.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from reroll.graph.editing import drop_dead
from reroll.graph.effects import Mode, attribute, autocasts, grad_enabled, mark_random
from reroll.graph.fakes import contiguous, fake_like, fake_of, new_fake_mode
from reroll.graph.lines import take_line, where
from reroll.graph.private import map_aggregate
from reroll.recurrence import Peeled, Recurrence, Slices


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """What a step or a region does; ``path`` is where the names in its graph start from the outermost module."""

    module: fx.GraphModule
    path: str = ""

    @property
    def inputs(self) -> list[fx.Node]:
        """Its placeholders."""
        found: list[fx.Node] = self.module.graph.find_nodes(op="placeholder")
        return found

    @property
    def results(self) -> tuple[Any, ...]:
        """What it gives."""
        return tuple(self.module.graph.output_node().args[0])  # type: ignore[arg-type]

    def copy(self, kept: Sequence[int] | None = None) -> Body:
        """The body anew, with all of its results or some only."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.graph_copy(self.module.graph, env)
        indices = range(len(self.results)) if kept is None else kept
        graph.output(tuple(env[self.results[i]] for i in indices))
        drop_dead(graph)
        return Body(fx.GraphModule(self.module, graph), self.path)


@dataclass
class Emitter:
    """Writes at the end of a graph, in the place of ``source``, a node of the old graph that runs in mode ``mode``.

    ``rolled`` says whether loops are written as calls of recurrences, which are then collected in ``recurrences``.
    """

    root: torch.nn.Module
    graph: fx.Graph
    rolled: bool
    recurrences: list[Recurrence] = field(default_factory=list)
    source: fx.Node | None = None
    mode: Mode = (True, ())
    fake_mode: Any = field(default_factory=new_fake_mode)
    fakes: dict[fx.Node, Any] = field(default_factory=dict)
    bodies: dict[Any, Body] = field(default_factory=dict)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Call a function."""
        node = self.graph.call_function(target, args)
        return self._noted(node, self.run(target, *args))

    def to(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Cast a value; itself if it has the dtype."""
        if self.fake(value).dtype == dtype:
            return value
        return self._noted(self.graph.call_method("to", (value, dtype)), self.run(torch.Tensor.to, value, dtype))

    def run(self, function: Any, *args: Any) -> Any:
        """What a function gives on fakes of the values of nodes."""
        with self.fake_mode, modes_on(self.mode):
            return function(*fx.map_arg(args, self.fake))

    def fake(self, node: fx.Node) -> Any:
        """A fake of the value of a node, in the mode of this emitter."""
        if node not in self.fakes:
            value = node.meta.get("example_value")
            value = attribute(self.root, node) if value is None and node.op == "get_attr" else value
            self.fakes[node] = map_aggregate(value, lambda leaf: fake_of(self.fake_mode, leaf))
        return self.fakes[node]

    def _noted(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["example_value"] = self.fakes[node] = value
        if self.source is not None:
            take_line(node, self.source)
        return node

    def paste(self, body: Body, operands: Sequence[Any]) -> list[Any]:
        """Write a body out on operands; gives its results."""
        env: dict[fx.Node, Any] = dict(zip(body.inputs, operands, strict=True))
        for node in body.module.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            made = env[node] = self.graph.node_copy(node, env.__getitem__)
            if node.op == "get_attr" and body.path:
                made.target = f"{body.path}.{node.target}"
            if self.source is not None and not made.meta.get("stack_trace"):
                take_line(made, self.source)
        return [fx.map_arg(result, env.__getitem__) for result in body.results]

    def loop(
        self, body: Body, initial: Sequence[fx.Node], xs: Sequence[fx.Node], constants: Sequence[fx.Node], back: bool
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Run a body ``(carry..., x..., constant...) -> (carry..., y...)`` along the first dimension of ``xs``.

        Gives the last carries, and the stacked ys in the order of ``xs``; ``back`` runs from the end of ``xs``.
        """
        steps = int(self.fake(xs[0]).shape[0])
        if self.rolled and steps > 1:
            last, ys = self._recur(body, initial, xs, constants, steps, back)
            return last, [self.call(torch.flip, y, (0,)) for y in ys] if back else ys
        carry, rows = list(initial), []
        for t in reversed(range(steps)) if back else range(steps):
            results = self.paste(body, [*carry, *(self.call(torch.select, x, 0, t) for x in xs), *constants])
            carry = results[: len(initial)]
            rows.append(results[len(initial) :])
        ordered = rows[::-1] if back else rows
        return carry, [self.call(torch.stack, list(column)) for column in zip(*ordered, strict=True)]

    def _recur(
        self,
        body: Body,
        initial: Sequence[fx.Node],
        xs: Sequence[fx.Node],
        constants: Sequence[fx.Node],
        steps: int,
        back: bool,
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        name = f"recurrence_{len(self.recurrences)}"
        operands, carried = [*initial, *xs, *constants], len(initial)
        call = self.graph.call_module(name, tuple(operands))
        fakes = [self.fake(operand) for operand in operands]
        start, stride = (steps - 1, -1) if back else (0, 1)
        names = [node.name for node in body.inputs]
        recurrence = Recurrence(
            name=name,
            step=body.copy().module,
            steps=steps,
            carries=tuple(names[:carried]),
            xs=tuple(Slices(carried + i, 0, start, stride) for i in range(len(xs))),
            constants=tuple(range(carried + len(xs), len(operands))),
            ys=tuple(str(result) for result in body.results[carried:]),
            examples=tuple(contiguous(fake) if i < carried else fake for i, fake in enumerate(fakes)),
            autocast=autocasts(self.mode),
            grad_enabled=grad_enabled(self.mode),
            random=mark_random(body.module, body.module.graph),
            where="" if self.source is None else where(self.source),
            peeled=(Peeled(),) * carried,
        )
        self.recurrences.append(recurrence)
        needs = recurrence.grad_enabled and any(fake.requires_grad for fake in fakes)
        self._noted(call, tuple(self._results(body, carried, steps, needs)))
        results = [self.call(operator.getitem, call, i) for i in range(len(body.results))]
        return results[:carried], results[carried:]

    def _results(self, body: Body, carried: int, steps: int, needs: bool) -> Iterator[torch.Tensor]:
        """Fakes of the last carries and the stacked ys. A gradient is said to be needed wherever it may be."""
        for index, result in enumerate(body.results):
            like = result.meta["example_value"]
            shape = like.shape if index < carried else (steps, *like.shape)
            with self.fake_mode:
                made = torch.empty(shape, dtype=like.dtype, device=like.device)
            yield made.requires_grad_(needs and (made.is_floating_point() or made.is_complex()))


@contextlib.contextmanager
def modes_on(mode: Mode) -> Any:
    """The gradient and autocast modes of a node."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad_enabled(mode)))
        for device, dtype, enabled, cache in autocasts(mode):
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))  # type: ignore[arg-type]
        yield


def sever(graph: fx.Graph) -> None:
    """Give every node an example that shares memory with no other."""
    for node in graph.nodes:
        node.meta["example_value"] = map_aggregate(node.meta.get("example_value"), _alone)


def _alone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return fake_like(value, tuple(value.shape), value.stride(), 0, {})
