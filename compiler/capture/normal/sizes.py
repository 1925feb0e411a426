"""A graph with symbolic sizes as one with the sizes of this call.

Dynamo makes a size symbolic when it changes between calls (another batch). Segments are compiled for fixed sizes, so
a recurrence pins them: Dynamo's guards then compile once more for other sizes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from reroll.errors import CaptureError
from reroll.graph.fakes import bytes_of, fake_like, has_one_memory
from reroll.graph.lines import where
from reroll.graph.private import hint, map_aggregate, storage_id

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def concrete(graph: fx.Graph) -> fx.Graph:
    """The graph with the numbers of this call for symbolic ones; itself where nothing is symbolic."""
    if not any(_symbolic(node.meta.get("example_value")) for node in graph.nodes):
        return graph
    new = fx.Graph()
    env: dict[fx.Node, Argument] = {}
    bases: dict[Any, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op == "output":
            new.output(fx.map_arg(node.args[0], lambda old: env[old]))
            continue
        value = node.meta.get("example_value")
        if isinstance(value, _NUMBERS):
            if node.op == "placeholder":
                new.node_copy(node)
            env[node] = _hint(value, node)
            continue
        copied = new.node_copy(node, lambda old: env[old])
        copied.meta["example_value"] = map_aggregate(value, partial(_concrete_value, node, bases))
        env[node] = copied
    return new


def pin(graph: fx.Graph) -> None:
    """Hold every symbolic size of a graph at its value of this call, by a guard of Dynamo's."""
    for node in graph.nodes:
        map_aggregate(node.meta.get("example_value"), _pin_value)


def _pin_value(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        int(value)
    elif isinstance(value, torch.SymFloat):
        float(value)
    elif isinstance(value, torch.SymBool):
        bool(value)
    elif _symbolic(value):
        strided = value.layout is torch.strided
        for size in (*value.shape, *((*value.stride(), value.storage_offset()) if strided else ())):
            int(size)
    return value


def _symbolic(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_symbolic(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return isinstance(value, _NUMBERS)
    if value.layout is not torch.strided:
        return any(not isinstance(n, int) for n in value.shape)
    return any(not isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _hint(value: Any, node: fx.Node) -> Any:
    found = hint(value)
    if found is None:
        raise CaptureError(
            f"{where(node)}: this number or size depends on the values of tensors. Keep the number a tensor (drop "
            ".item()), and choose by torch.where instead of by an index"
        )
    return found


def _concrete_value(node: fx.Node, bases: dict[Any, torch.Tensor], value: Any) -> Any:
    """A tensor of the same layout with plain numbers; tensors that shared memory share it again, also with a parameter,
    which stays as it is."""
    if isinstance(value, _NUMBERS):
        return _hint(value, node)
    if isinstance(value, torch.nn.Parameter) and has_one_memory(value):
        bases.setdefault(storage_id(value), bytes_of(value))
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return value
    layout = [
        tuple(_hint(n, node) for n in numbers) for numbers in (value.shape, value.stride(), (value.storage_offset(),))
    ]
    return fake_like(value, layout[0], layout[1], layout[2][0], bases)
