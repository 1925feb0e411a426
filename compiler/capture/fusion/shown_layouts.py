"""Whether a user, or an operation behind a value, can tell in which order its dimensions lie in memory."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from reroll.graph.effects import example, is_random, spelled
from reroll.graph.inplace import out_of_place
from reroll.graph.layouts import lay_out, memory_order

_TELLS = ("view", "view_as", "as_strided", "stride", "is_contiguous", "contiguous", "ravel", "unflatten", "unfold")


def as_it_lay(graph: fx.Graph, made: fx.Node, old: fx.Node, dim: int, apart: Container[fx.Node]) -> fx.Node:
    """A value that was made with steps first, and moved to dimension ``dim``, in the memory order of the old node.

    Only where something can tell: a copy takes memory. apart: readers of the old node that are done away with.
    """
    value = example(old)
    assert value is not None
    stacked = torch.empty(value.movedim(dim, 0).shape, device="meta")
    wanted = memory_order(value)
    if wanted == memory_order(stacked.movedim(0, dim)) or not _shows(old, apart):
        return made
    return lay_out(graph, made, wanted)


def _shows(node: fx.Node, apart: Container[fx.Node]) -> bool:
    """Whether the layout of a node's value shows in a result of the graph, or makes an operation fail."""
    todo, seen = [user for user in node.users if user not in apart], set[fx.Node]()
    while todo:
        user = todo.pop()
        if user in seen:
            continue
        seen.add(user)
        name = spelled(user).split(".")[0]
        if user.op in ("output", "call_module") or user.target is out_of_place:
            return True
        if name in _TELLS or name.endswith("_like") or is_random(user):
            return True
        value = example(user)
        if value is None or value.numel() > 1:
            todo += user.users
    return False
