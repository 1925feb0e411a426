"""Loop invariants: what a segment makes of constants of the loop alone is made once per call, not once per segment.

Pointwise work and views stay where they are: they are fused with what reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.editing import repeatable
from reroll.segment.ops import PACK


class Once:
    """The invariants of all halves of a recurrence, in one graph over its constants: equal ones are one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._graph = fx.Graph()
        self._inputs = {name: self._graph.placeholder(name) for name in names}
        self._known: dict[Any, fx.Node] = {}
        self._values: list[fx.Node] = []
        self._run: fx.GraphModule | None = None

    def take(self, half: fx.GraphModule) -> tuple[int, ...]:
        """Move the invariants of a half here. It gets one more operand for each; gives their places in ``values``."""
        graph = half.graph
        moved = _worth_moving(graph)
        places = []
        for node in moved:
            value = self._copy(node)
            if value not in self._values:
                self._values.append(value)
            places.append(self._values.index(value))
            last = graph.find_nodes(op="placeholder")[-1]
            with graph.inserting_after(last):
                operand = graph.placeholder(f"once_{places[-1]}")
            operand.meta = {"val": node.meta["val"], "constant": node.name, "once": value}
            node.replace_all_uses_with(operand)
        if moved:
            graph.eliminate_dead_code()
            half.recompile()
            self._run = None
        return tuple(places)

    def _copy(self, node: fx.Node) -> fx.Node:
        """The node of this graph that computes the same."""
        known: fx.Node | None = node.meta.get("once")
        if known is not None:
            return known
        if node.op == "placeholder":
            return self._inputs[node.meta["constant"]]
        sources = {source: self._copy(source) for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)
        key = (node.target, repr(args), repr(kwargs))
        if key not in self._known:
            self._known[key] = self._graph.create_node("call_function", node.target, args, kwargs)
            self._known[key].meta = {"val": node.meta["val"]}
        return self._known[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all values together."""
        return sum(int(node.meta["val"].nbytes) for node in self._values)

    @property
    def packed(self) -> int:
        """Bytes of the weights among them that are laid out as products read them."""
        return sum(int(node.meta["val"].nbytes) for node in self._values if node.target is PACK)

    def values(self, constants: Sequence[Tensor]) -> list[Tensor]:
        """The invariants, of the constants of a call."""
        if not self._values:
            return []
        if self._run is None:
            graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
            graph.graph_copy(self._graph, copies)
            graph.output([copies[node] for node in self._values])
            self._run = fx.GraphModule(torch.nn.Module(), graph)
        found: list[Tensor] = self._run(*constants)
        return found


def _invariants(graph: fx.Graph) -> set[fx.Node]:
    """Constants, and what is made of nothing but these: no random numbers."""
    found = {node for node in graph.find_nodes(op="placeholder") if node.meta.get("constant")}
    for node in graph.nodes:
        if repeatable(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _worth_moving(graph: fx.Graph) -> list[fx.Node]:
    """Invariants that are no pointwise work and no views, and that something reads which stays."""
    fixed, moved, staying = _invariants(graph), list[fx.Node](), set[fx.Node]()
    for node in reversed(graph.nodes):
        if node in fixed and any(user not in fixed or user in staying for user in node.users):
            if _is_worth_it(node):
                moved.append(node)
            else:
                staying.add(node)
    return moved[::-1]


def _is_worth_it(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    return not target.is_view and torch.Tag.pointwise not in target.tags
