"""Small graphs that are written as functions, with an example of every value: what an analysis is tried on alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx


class _Examples(fx.Interpreter):
    """Runs a graph, and notes at each node what it gave."""

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def written(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """What a function of tensors calls, as a graph; a loop over a range is written out."""
    module = fx.symbolic_trace(function)
    _Examples(module).run(*inputs)
    return module


def called(target: Any, *given: Any) -> fx.GraphModule:
    """The graph of one call of a function, or of a method by its name; tensors are inputs."""
    graph = fx.Graph()
    operands = [
        graph.placeholder(f"operand_{at}") if isinstance(each, Tensor) else each for at, each in enumerate(given)
    ]
    method = isinstance(target, str)
    graph.output(graph.create_node("call_method" if method else "call_function", target, tuple(operands)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    _Examples(module).run(*(each for each in given if isinstance(each, Tensor)))
    return module


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of a graph, in order."""
    return [node for node in graph.nodes if node.op in ("call_function", "call_method")]


def filled(*sizes: int) -> Tensor:
    """A tensor in which every element is another number."""
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
