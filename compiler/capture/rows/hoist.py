"""The graph around recurrences while they are rewritten: a copy of it, and what a call needs moved in front of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from reroll.capture.fills import filled, filling
from reroll.capture.rows.row_analysis import Illegal
from reroll.capture.rows.row_rules import Rows
from reroll.graph.effects import example, has_effect, modes, operation
from reroll.graph.lines import where


def copy_with_examples(graph: fx.Graph) -> fx.Graph:
    """A copy in which every tensor has an example."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    add_examples(new)
    return new


def add_examples(graph: fx.Graph) -> None:
    """Give every tensor that has none an example."""
    for node in graph.nodes:
        source = example(node.all_input_nodes[0]) if node.all_input_nodes else None
        if "example_value" not in node.meta and source is not None:
            _infer(node, source)


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
    made: Any = args[0] if isinstance(node.target, str) else node.target(*args)
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


def settle_fills(graph: fx.Graph) -> None:
    """A tensor of zeros or ones that is made like another one depends on its shape only: write the shape out."""
    for node in list(graph.nodes):
        number, value = filling(node) if operation(node).makes in ("zeros", "ones") else None, example(node)
        if number is None or value is None:
            continue
        made = filled(node, value, number)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def row_read(node: fx.Node) -> tuple[fx.Node | None, int, int]:
    """(value, dimension, index) of a node that reads one row, itself or by ``torch.unbind``."""
    if node.op != "call_function" or len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return None, 0, 0
    source, rank = node.args[0], example(node.args[0])
    if node.target is torch.select and rank is not None and isinstance(node.args[2], int):
        return source, int(node.args[1]) % rank.dim(), node.args[2]  # type: ignore[arg-type]
    if source.target is torch.unbind and isinstance(node.args[1], int):
        return source.args[0], int(source.args[1]), node.args[1]  # type: ignore[arg-type,return-value]
    return None, 0, 0
