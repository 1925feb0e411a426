"""Python's random numbers that a graph of Dynamo's reads: drawn anew at each call, and handed over as tensors.

Dynamo describes a float of ``random.uniform`` and its kin as a tensor of torch's default type on its default device,
and hands it over in float64 on the CPU at each call. Inductor reads its memory as what it was told: plain
``torch.compile`` gives wrong results in silence (seen on torch 2.13; the sources of 2.11 do the same).

Private torch API, tried on 2.13 and read in 2.11: ``RandomValueSource``, by which Dynamo says where such a number is
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import RandomValueSource

from reroll.errors import UnsupportedError
from reroll.graph.effects import example
from reroll.graph.lines import where

_WIDE = (torch.float64, torch.complex128)


def as_handed_over(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The example inputs of a graph, with such numbers as they come at each call. The graph, which is changed in place,
    reads them as it did. Raises UnsupportedError where that rounds them: beside values of float64, or to a half."""
    placeholders, found = module.graph.find_nodes(op="placeholder"), list(inputs)
    drawn = [place for place, node in enumerate(placeholders) if _is_random_float(node)]
    kinds = {value.dtype for value in map(example, placeholders) if value is not None}
    if drawn and (kinds.intersection(_WIDE) or torch.get_default_dtype() != torch.float32):
        reader = next(iter(placeholders[drawn[0]].users), placeholders[drawn[0]])
        raise UnsupportedError(
            f"The model draws a number from Python's random, at {where(reader)}. torch.compile describes it as "
            f"{torch.get_default_dtype()}, too short for the number or for the model's values. Draw it from torch "
            "(torch.empty(()).uniform_(a, b)), or call torch.set_default_dtype(torch.float64) first."
        )
    for place in drawn:
        _narrow(module.graph, placeholders[place])
        found[place : place + 1] = [placeholders[place].meta["example_value"]] if found else []
    if drawn:
        module.recompile()
    return found


def _is_number(node: fx.Node) -> bool:
    given = node.meta.get("grapharg")
    return given is not None and isinstance(given.source, RandomValueSource)


def _is_random_float(node: fx.Node) -> bool:
    """Whether an input is a float of Python's generator that is described as less than it is."""
    value = example(node)
    return _is_number(node) and value is not None and value.is_floating_point() and value.dtype != torch.float64


def _narrow(graph: fx.Graph, node: fx.Node) -> None:
    """Let a number come in float64 on the CPU, and what reads it read it as it was described."""
    described = example(node)
    assert described is not None
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        narrow = graph.call_method("to", (node, described.device, described.dtype))
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
    narrow.meta |= {key: value for key, value in node.meta.items() if key != "grapharg"}
    node.meta["example_value"] = described.to("cpu", torch.float64)
