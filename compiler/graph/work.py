"""How much a graph computes, by the shapes of its values: the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from reroll.graph.memory import result_nbytes

aten = torch.ops.aten
_FLOPS = 4.0  # of products, in the time in which a core moves a byte
_SECONDS = 5e-6, 1e-10, 1.25e-11
"""About how long a core takes to begin an operation of torch, to move a byte, and for one multiplication or addition of
a product: within a half of what seven networks took on one with AVX-512."""
_ON_A_CPU = {  # attention of which torch counts the twin on other devices alone
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def work(graph: fx.Graph) -> float:
    """What the operations of a graph take, in bytes moved: what they make, and the arithmetic of products.

    Values need examples (``val`` in their meta).
    """
    return sum(result_nbytes(node.meta.get("val")) + _flops(node) / _FLOPS for node in _calls(graph))


def eager_seconds(graph: fx.Graph) -> float:
    """About how long a core takes for a graph of which torch runs one operation at a time. Nothing is measured."""
    begun, moved, multiplied = _SECONDS
    calls = _calls(graph)
    return sum(begun + moved * result_nbytes(node.meta.get("val")) + multiplied * _flops(node) for node in calls)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _flops(node: fx.Node) -> float:
    operation: Any = getattr(node.target, "overloadpacket", node.target)
    count = flop_registry.get(_ON_A_CPU.get(operation, operation))
    if count is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))
