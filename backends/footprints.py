"""Bytes of compiled segments: from inductor's own plan where its wrapper can be read, else from the ATen graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from reroll.backends.lowering import Segment
from reroll.footprint import graph_peak, origin, saved_nbytes, storage_nbytes, wrapper_peak
from reroll.prediction import SegmentBytes
from reroll.recurrence import Items, Recurrence, Slices


def footprint(segment: Segment, carries: int) -> SegmentBytes:
    """What the runs of a segment hold, whose first ``carries`` inputs are the carry."""
    placeholders = segment.forward_graph.graph.find_nodes(op="placeholder")
    operands, own = placeholders[carries:], [node.name for node in placeholders[:carries]]
    results: Any = segment.forward_graph.graph.output_node().args[0]
    saved = results[segment.outputs :]
    fresh = _peak(segment.forward, segment.forward_graph.graph, own)
    kept = _peak(segment.forward, segment.forward_graph.graph, [])
    reverse = 0
    if segment.backward is not None and segment.backward_graph is not None:
        owned = [node.name for node in saved if isinstance(node, fx.Node) and origin(node) not in operands]
        reverse = _peak(segment.backward, segment.backward_graph.graph, owned)
    return SegmentBytes(saved_nbytes(saved, operands), fresh, kept, reverse)


def carry_gradients(segment: Segment, carries: int) -> int:
    """Bytes of the gradients with respect to a carry."""
    return sum(storage_nbytes(segment.output_examples[index]) for index in segment.tangents if index < carries)


def output_gradients(segment: Segment, carries: int, steps: int) -> int:
    """Bytes of the gradients with respect to the stacked outputs of all steps."""
    found = (segment.output_examples[index] for index in segment.tangents if index >= carries)
    return sum(storage_nbytes(like) // like.shape[0] * steps for like in found)


def _peak(compiled: Any, graph: fx.Graph, owned: list[str]) -> int:
    source = getattr(compiled, "source_code", None)
    if isinstance(source, str):
        sizes = {node.name: storage_nbytes(node.meta.get("val")) for node in graph.find_nodes(op="placeholder")}
        peak = wrapper_peak(source, {name: sizes[name] for name in owned})
        if peak is not None:
            return peak
    return graph_peak(graph, owned)


def operand_gradients(segment: Segment, recurrence: Recurrence) -> int:
    """Bytes of the gradients that are added up over the steps, for constants and the operands of per-step inputs."""
    operands: set[int] = set()
    at = len(recurrence.carries)
    for x in recurrence.xs:
        if isinstance(x, Slices) and at in segment.inputs:
            operands.add(x.operand)
        elif isinstance(x, Items) and any(at + k in segment.inputs for k in range(segment.steps)):
            operands.update(x.operands)
        at += segment.steps if isinstance(x, Items) else 1
    operands.update(n for place, n in enumerate(recurrence.constants) if at + place in segment.inputs)
    return sum(recurrence.examples[operand].nbytes for operand in operands)
