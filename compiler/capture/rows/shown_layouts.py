"""Whether a user, or an operation behind a value, can tell in which order its dimensions lie in memory."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from reroll.graph.effects import example
from reroll.graph.layouts import lay_out, memory_order, shows


def as_it_lay(graph: fx.Graph, made: fx.Node, old: fx.Node, dim: int, apart: Container[fx.Node]) -> fx.Node:
    """A value that was made with steps first, and moved to dimension ``dim``, in the memory order of the old node.

    Only where something can tell: a copy takes memory. apart: readers of the old node that are done away with.
    """
    value = example(old)
    assert value is not None
    stacked = torch.empty(value.movedim(dim, 0).shape, device="meta")
    wanted = memory_order(value)
    if wanted == memory_order(stacked.movedim(0, dim)) or not shows(old, apart):
        return made
    return lay_out(graph, made, wanted)
