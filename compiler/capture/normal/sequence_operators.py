"""Operators that run a neuron over a whole sequence become the loop over time that they hold.

SpikingJelly 2.0 gives each layer in multi-step mode as one operator, ``(x_seq, v, ...) -> (spikes, v, charged)``, a
loop that no graph shows. A call of it on one step is the same operator, so T such calls, each with the state of the
one before, give the same numbers, and the repeating step is found as in single-step mode.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.graph.effects import example
from reroll.graph.private import is_overload


@dataclass(frozen=True, slots=True)
class SequenceOp:
    """An operator over dimension 0 of operand ``sequence`` that carries operand ``state``.

    Its result ``final`` is the last state, or those of all steps if operand ``record`` is true; the others are
    stacked over the steps.
    """

    sequence: int
    state: int
    record: int
    final: int


_KNOWN = {
    "sj_if::forward": SequenceOp(sequence=0, state=1, record=6, final=1),
    "sj_lif::forward": SequenceOp(sequence=0, state=1, record=8, final=1),
    "sj_plif::forward": SequenceOp(sequence=0, state=1, record=8, final=1),
}


def show_loops(graph: fx.Graph) -> fx.Graph:
    """The graph with every known operator over more than one step as one call a step; itself if there is none."""
    if not any(_steps(node) > 1 for node in graph.nodes):
        return graph
    new = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            new.output(fx.map_arg(node.args[0], lambda old: env[old]))
        elif _steps(node) > 1:
            env[node] = _loop(new, node, env)
        elif isinstance(inner := env.get(next(iter(node.all_input_nodes), node)), tuple):
            env[node] = inner[node.args[1]]
        else:
            env[node] = new.node_copy(node, lambda old: env[old])
    return new


def _known(node: fx.Node) -> SequenceOp | None:
    return _KNOWN.get(node.target.name()) if is_overload(node.target) else None  # type: ignore[union-attr]


def _steps(node: fx.Node) -> int:
    """Steps that a node runs inside, 0 if it is no operator over a sequence."""
    known = _known(node)
    if known is None or len(node.args) <= known.record or any(example(given) is None for given in node.all_input_nodes):
        return 0
    value = example(node.args[known.sequence])
    return 0 if value is None else value.shape[0]


def _loop(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> tuple[fx.Node, ...]:
    """The calls of one operator, a step each, and its results."""
    op = _known(node)
    assert op is not None
    args: list[Any] = list(fx.map_arg(node.args, lambda old: env[old]))
    recorded, args[op.record] = args[op.record], False
    sequence, rows = args[op.sequence], list[list[fx.Node]]()
    for t in range(_steps(node)):
        args[op.sequence] = _call(graph, node, torch.unsqueeze, _call(graph, node, torch.select, sequence, 0, t), 0)
        results = _results(graph, node, args)
        args[op.state] = results[op.final]
        rows.append([_row(graph, node, result, at == op.final) for at, result in enumerate(results)])
    return tuple(
        column[-1] if at == op.final and not recorded else _call(graph, node, torch.stack, list(column))
        for at, column in enumerate(zip(*rows, strict=True))
    )


def _results(graph: fx.Graph, node: fx.Node, args: list[Any]) -> list[fx.Node]:
    made = _call(graph, node, node.target, *args)
    return [_call(graph, node, operator.getitem, made, at) for at in range(len(made.meta["example_value"]))]


def _row(graph: fx.Graph, node: fx.Node, result: fx.Node, final: bool) -> fx.Node:
    return result if final else _call(graph, node, torch.select, result, 0, 0)


def _call(graph: fx.Graph, origin: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call with its example value, at the origin's line of the user's code."""
    made = graph.call_function(target, args)
    given = fx.map_arg(args, lambda node: node.meta["example_value"])
    with torch.set_grad_enabled(any(value.requires_grad for value in origin.meta["example_value"])):
        made.meta = dict(origin.meta, example_value=target(*given))
    return made
