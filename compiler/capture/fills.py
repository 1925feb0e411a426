"""Tensors that are filled with a number, and take after another one in nothing but their shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from reroll.graph.effects import example, operation
from reroll.graph.layouts import is_plain, memory_order


def filling(node: fx.Node) -> float | None:
    """The number that such a tensor is filled with; None for any other.

    Not where it lies in memory in another order than plain ones, as random numbers may be drawn into it.
    """
    value, known = example(node), operation(node)
    if not known.like or value is None or value.requires_grad or not is_plain(memory_order(value)):
        return None
    if known.makes in ("zeros", "ones"):
        return int(known.makes == "ones")
    at = known.number_at
    given = node.args[at] if at is not None and len(node.args) > at else None
    return given if isinstance(given, int | float) else None


def filled(before: fx.Node, value: torch.Tensor, number: float) -> fx.Node:
    """A tensor of the shape of an example, filled with a number, before a node. It has no example yet."""
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with before.graph.inserting_before(before):
        return before.graph.call_function(torch.full, (tuple(value.shape), number), options)
