"""Functions with gradients of their own, as a record holds them, written as graphs of their operations.

A record calls an ``autograd.Function`` as a whole. A file that runs alone needs its operations, forward and backward;
Dynamo reads these where it can (``torch.compile`` of the call alone, with a backend that keeps the graph).
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from reroll.capture.recorder.function_nodes import is_application
from reroll.graph.effects import example

_NAME = re.compile(r"L_tensors_(\d+)_")  # of an input of Dynamo's graph


def with_operations(module: fx.GraphModule) -> fx.GraphModule:
    """A graph in which functions that Dynamo reads are operators that hold their graphs; itself where there are none.
    Others stay calls."""
    calls = [node for node in module.graph.nodes if is_application(node.target)]
    read = {node: found for node in calls if (found := _read(node)) is not None}
    if not read:
        return module
    made, env = fx.GraphModule(copy.copy(module), fx.Graph()), dict[fx.Node, fx.Node]()
    for name, value in (*module.named_children(), *module.named_buffers(recurse=False)):
        setattr(made, name, value)
    for node in module.graph.nodes:
        if node in read:
            _write(made, node, read[node], env)
        elif node not in env:
            env[node] = made.graph.node_copy(node, env.__getitem__)
    made.recompile()
    return made


def _read(node: fx.Node) -> tuple[fx.GraphModule, list[int]] | None:
    """Dynamo's graph of one call of tensors, and the place among these of each of its inputs."""
    values = [example(each) if isinstance(each, fx.Node) else None for each in node.args]
    given = [_like(value) for value in values if value is not None]
    if node.kwargs or len(given) != sum(isinstance(each, fx.Node) for each in node.args):
        return None
    found = list[fx.GraphModule]()

    def kept(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    target: Any = node.target
    operands = [None if isinstance(each, fx.Node) else each for each in node.args]
    tensor_places = [at for at, each in enumerate(node.args) if isinstance(each, fx.Node)]

    def call(*tensors: Tensor) -> Any:
        given = list(operands)
        for at, tensor in zip(tensor_places, tensors, strict=True):
            given[at] = tensor
        return target(*given)

    try:
        torch.compile(call, backend=kept, fullgraph=True, dynamic=False)(*given)
    except Exception:  # noqa: BLE001  # whatever Dynamo finds: the call stays as it is, which the file's writer says
        return None
    named = [_NAME.fullmatch(str(each.target)) for graph in found for each in graph.graph.find_nodes(op="placeholder")]
    places = [int(each[1]) for each in named if each is not None]
    return (found[0], places) if len(found) == 1 and len(places) == len(named) else None


def _like(value: Tensor) -> Tensor:
    """A tensor of zeros like an example, which needs a gradient where it can."""
    made = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return made.requires_grad_(made.is_floating_point() or made.is_complex())


def _write(
    module: fx.GraphModule, node: fx.Node, read: tuple[fx.GraphModule, list[int]], env: dict[fx.Node, fx.Node]
) -> None:
    """Write the graph of a call in its place."""
    graph, places = read
    tensors = [each for each in node.args if isinstance(each, fx.Node)]
    inner = dict(zip(graph.graph.find_nodes(op="placeholder"), (env[tensors[at]] for at in places), strict=True))
    for each in graph.graph.nodes:
        if each.op == "get_attr":
            name = f"{node.name}_{str(each.target).replace('.', '_')}"
            setattr(module, name, getattr(graph, str(each.target)))
            inner[each] = module.graph.get_attr(name)
        elif each.op not in ("placeholder", "output"):
            inner[each] = module.graph.node_copy(each, inner.__getitem__)
    results: Any = graph.graph.output_node().args[0]
    if isinstance(node.meta.get("example_value"), Tensor):
        env[node] = inner[results[0]]
        return
    for user in node.users:
        if user.target is operator.getitem:
            env[user] = inner[results[user.args[1]]]
