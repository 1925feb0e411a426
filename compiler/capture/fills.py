"""Tensors that are filled with a number, and take after another one in nothing but their shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from reroll.graph.effects import example, spelled
from reroll.graph.layouts import is_plain, memory_order

LIKE = {"new_zeros": 0, "zeros_like": 0, "new_ones": 1, "ones_like": 1}
_GIVEN = {"full_like": 1, "new_full": 2}  # where the number stands


def filling(node: fx.Node) -> float | None:
    """The number that such a tensor is filled with; None for any other.

    Not where it lies in memory in another order than plain ones, as random numbers may be drawn into it.
    """
    value, name = example(node), spelled(node)
    known = node.op in ("call_function", "call_method") and (name in LIKE or name in _GIVEN)
    if not known or value is None or value.requires_grad or not is_plain(memory_order(value)):
        return None
    if name in LIKE:
        return LIKE[name]
    given = node.args[_GIVEN[name]] if len(node.args) > _GIVEN[name] else None
    return given if isinstance(given, int | float) else None


def filled(before: fx.Node, value: torch.Tensor, number: float) -> fx.Node:
    """A tensor of the shape of an example, filled with a number, before a node. It has no example yet."""
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with before.graph.inserting_before(before):
        return before.graph.call_function(torch.full, (tuple(value.shape), number), options)
