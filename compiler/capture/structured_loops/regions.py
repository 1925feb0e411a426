"""Loops and steps that arrive in Dynamo's graph as such: taken as they are, before any step is looked for.

``nn.RNN``, ``nn.GRU``, ``nn.LSTM`` and ``torch.scan`` become recurrences. What ``torch.compiler.nested_compile_region``
marks is written out in the place of its calls, so that a loop around it is found as if nothing had been marked. Over
one step a loop is written out too: it stands in a loop of the user's own. So is a loop inside the step of another.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from reroll.capture.normal.functional import functionalise
from reroll.capture.normal.sizes import concrete
from reroll.capture.recorder.ragged import LAYERS
from reroll.capture.structured_loops.emitter import Body, Emitter, sever
from reroll.capture.structured_loops.rnn import CELLS, expand
from reroll.errors import CaptureError
from reroll.graph.editing import drop_dead
from reroll.graph.effects import Mode, attribute, has_effect, is_random, mark_random, modes
from reroll.graph.inplace import storage_of, updated_places
from reroll.graph.lines import where
from reroll.graph.names import LABEL, take_names
from reroll.recurrence import Recurrence

_REGION, _SCAN = torch.ops.higher_order.invoke_subgraph, torch.ops.higher_order.scan


def capture_structured_loops(module: fx.GraphModule) -> tuple[fx.Graph, tuple[Recurrence, ...]]:
    """The graph, with numbers for symbolic sizes and calls of its given loops in their places, and these loops."""
    taking = _Taking(module, concrete(module.graph), rolled=True)
    return taking.run(), tuple(taking.emitter.recurrences)


def without_regions(module: fx.GraphModule) -> fx.GraphModule:
    """A module whose regions are written out as they stand, since torch cannot run them eagerly; itself without any."""
    graph = _Taking(module, module.graph, rolled=False, raw=True).run()
    return module if graph is module.graph else fx.GraphModule(module, graph)


class _Taking:
    """One graph, copied with its given nodes replaced; ``raw`` replaces regions only, in-place code and all."""

    def __init__(
        self, module: fx.GraphModule, graph: fx.Graph, *, rolled: bool, raw: bool = False, around: Mode = (True, ())
    ) -> None:
        self.module, self.graph, self.raw, self.around = module, graph, raw, around
        self.emitter = Emitter(module, fx.Graph(), rolled)
        self.env: dict[fx.Node, Any] = {}
        self.bodies: dict[int, Body] = {}
        self.picked: dict[fx.Node, fx.Node] = {}

    def run(self) -> fx.Graph:
        """The new graph; the old one if nothing is given in it."""
        if not any(self._is_structured_loop(node) for node in self.graph.nodes):
            return self.graph
        old = fx.Graph()
        old.output(old.graph_copy(self.graph, {}))
        mark_random(self.module, old)
        drop_dead(old, _stays)
        calls = [node for node in old.nodes if node.op.startswith("call")]
        mode_of = dict(zip(calls, modes(calls), strict=False))
        for node in old.nodes:
            if node.op == "output":
                self.emitter.graph.output(fx.map_arg(node.args[0], self._new))
            elif self._is_structured_loop(node):
                grad, regions = mode_of[node]
                self.emitter.source = node
                self.emitter.mode = (grad and self.around[0], (*self.around[1], *regions))
                self.env[node] = self._replaced(node)
            elif node.target is operator.getitem and self._is_structured_loop(node.all_input_nodes[0]):
                self._pick(node)
            else:
                self.env[node] = self.emitter.graph.node_copy(node, self._new)
        return self.emitter.graph

    def _new(self, old: fx.Node) -> Any:
        return self.env[old]

    def _is_structured_loop(self, node: fx.Node) -> bool:
        if node.op != "call_function" or (self.raw and node.target is not _REGION):
            return False
        return node.target in (_REGION, _SCAN) or _is_layer(node)

    def _replaced(self, node: fx.Node) -> list[Any]:
        """The results of a given node, written anew."""
        if _is_layer(node):
            return list(expand(self.emitter, node, self._new, _read_results(node)))
        body = self._body(node.args[0])
        if node.target is _REGION:
            given: Any = fx.map_arg(node.args[2:], self._new)
            _check_updates(node, body, given)
            return self.emitter.paste(body, given)
        operands: Any = fx.map_arg(node.args[1:4], self._new)
        initial, xs, constants = (list(each) for each in operands)
        carried, read = len(initial), _read_results(node)
        draws = any(is_random(inner) for inner in body.module.graph.nodes)  # what nobody reads is drawn all the same
        kept = [i for i in range(len(body.results)) if draws or i < carried or i in read]
        last, ys = self.emitter.loop(body.copy(kept), initial, xs, constants, back=False)
        results = dict(zip(kept, [*last, *ys], strict=True))
        return [results.get(i) for i in range(len(body.results))]

    def _pick(self, node: fx.Node) -> None:
        """One result of a given node. Torch gives results that share no memory, so what is given twice is copied."""
        value = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        if isinstance(value, fx.Node):
            if self.picked.setdefault(value, node).args != node.args:
                value = self.emitter.call(torch.clone, value)
            value.meta["example_value"] = node.meta["example_value"]
        self.env[node] = value

    def _body(self, name: Any) -> Body:
        inner: Any = attribute(self.module, name)
        if id(inner) not in self.bodies:
            path = str(name.target)
            self.bodies[id(inner)] = Body(self._raw_body(inner) if self.raw else self._functional_body(inner), path)
        return self.bodies[id(inner)]

    def _raw_body(self, inner: fx.GraphModule) -> fx.GraphModule:
        return fx.GraphModule(inner, _Taking(inner, inner.graph, rolled=False, raw=True).run())

    def _functional_body(self, inner: fx.GraphModule) -> fx.GraphModule:
        around = self.emitter.mode
        graph = functionalise(_Taking(inner, concrete(inner.graph), rolled=False, around=around).run())
        take_names(graph)
        mark_random(inner, graph)
        drop_dead(graph, _stays)
        sever(graph)
        graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
        return fx.GraphModule(inner, graph)


def _is_layer(node: fx.Node) -> bool:
    return node.target in CELLS or node.target in LAYERS


def _stays(node: fx.Node) -> bool:
    return has_effect(node) or bool(updated_places(node)) or node.target in (_REGION, LABEL)


def _read_results(node: fx.Node) -> set[int]:
    """Which results of a node are read; only ``operator.getitem`` reads them."""
    assert all(user.target is operator.getitem for user in node.users)
    return {int(user.args[1]) for user in node.users}  # type: ignore[arg-type]


def _check_updates(node: fx.Node, body: Body, operands: Any) -> None:
    """An operand that a region updates must share no memory with another one: torch traced it as if so."""
    for index in _updated_inputs(body):
        storages = [storage_of(operand) for operand in operands]
        if storages.count(storages[index]) > 1:
            text = "this region updates memory that it is given twice. Write it out of place."
            raise CaptureError(f"{where(node)}: {text}")


def _updated_inputs(body: Body) -> Iterator[int]:
    for index, placeholder in enumerate(body.inputs):
        if any(user.target == "copy_" and user.args[0] is placeholder for user in placeholder.users):
            yield index
