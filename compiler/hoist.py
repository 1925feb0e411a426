"""The graph around recurrences while they are rewritten: a copy of it, and what a call needs moved in front of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from reroll.effects import example, has_effect, modes
from reroll.functional import where
from reroll.rowrules import Rows
from reroll.rowwise import Illegal


def copy_with_examples(graph: fx.Graph) -> fx.Graph:
    """A copy in which every tensor has an example."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in new.nodes:
        source = example(node.all_input_nodes[0]) if node.all_input_nodes else None
        if "example_value" not in node.meta and source is not None:
            _infer(node, source)
    return new


def _infer(node: fx.Node, source: torch.Tensor) -> None:
    """The example of a node that the capture added: a view, or a cat of views."""
    if node.target not in (torch.unsqueeze, torch.narrow, torch.movedim, torch.flatten, torch.cat, "contiguous"):
        return
    values = [example(n) for n in node.all_input_nodes]
    if any(value is None for value in values):
        return
    shapes = {
        n: torch.empty(v.shape, device="meta")
        for n, v in zip(node.all_input_nodes, values, strict=True)
        if v is not None
    }
    args = fx.map_arg(node.args, shapes.__getitem__)
    made = args[0] if isinstance(node.target, str) else node.target(*args)  # type: ignore[operator]
    needs = any(value is not None and value.requires_grad for value in values)
    node.meta["example_value"] = source.new_empty(made.shape).requires_grad_(needs)


def hoist(
    graph: fx.Graph, before: fx.Node, needs: list[fx.Node], random: set[str], rows: Mapping[fx.Node, Rows | str]
) -> None:
    """Move what the fused loop needs besides the rows of the first one in front of it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    mode = dict(zip(graph.nodes, modes(list(graph.nodes)), strict=False))
    moved: set[fx.Node] = set()
    todo = list(needs)
    while todo:
        node = todo.pop()
        if node in rows:
            raise Illegal(
                str(rows[node]) if isinstance(rows[node], str) else "the second needs all steps of the first at once"
            )
        if order[node] < order[before] or node in moved:
            continue
        pure = node.target not in random if node.op == "call_module" else not has_effect(node)
        if not pure or mode[node] != mode[before]:
            raise Illegal(f"what is at {where(node)}, between them, cannot be done before the first")
        moved.add(node)
        todo += node.all_input_nodes
    for node in sorted(moved, key=order.__getitem__):
        before.prepend(node)
