"""Keep the 0/1 values of a tape in bits along time: eight saved tensors of one shape become one tensor of bytes.

Packing along time is pointwise, so it fuses with what makes the values and vectorises. Measured under inductor (torch
2.13, AVX-512, 16 tensors of 32x256, one thread): with int32 arithmetic and the result stored as uint8 17 us to pack and
10 us to unpack; with arithmetic in uint8 443 and 97 us, in int16 64 and 72 us; int32 words are no faster and hold 31.
Truth values are packed on a CPU though each be alone: to write 512x256 of them takes 1,041 us as truth values and
22 us as words, to read them 400 and 26 us (one core of an AMD EPYC with AVX-512).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from reroll.graph.editing import aten, call
from reroll.segment.facts import FOLLOWED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reroll.segment.facts import Fact

CONVERT = torch.ops.prims.convert_element_type.default
WORD, BITS = torch.uint8, 8  # what travels, and the values that it holds
WIDE = torch.int32  # in what the arithmetic is done


def pack_saved(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fixed_outputs: int, facts: Mapping[str, Fact]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Copies of a partitioned forward and backward in which saved 0/1 tensors travel in bits.

    ``forward`` gives ``num_fixed_outputs`` results and then saved values; ``backward`` has a placeholder of the name of
    each saved value. ``facts`` belong to the forward's nodes by name, and must hold without assumptions on the inputs:
    nothing is checked at run time. A word takes the place of its first value on both sides. Inputs of the forward,
    numbers, tensors of symbolic shape and what would gain nothing stay as they are.
    """
    forward, backward = _copied(forward), _copied(backward)
    results: Any = forward.graph.output_node().args[0]
    saved = list(results[num_fixed_outputs:])
    readers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    taken = {node.name for graph in (forward.graph, backward.graph) for node in graph.nodes}
    for values in _words(saved, readers, facts):
        name = next(name for name in (f"packed_{number}" for number in range(len(taken) + 1)) if name not in taken)
        taken.add(name)
        word = _pack(forward.graph, values, name)
        _unpack(backward.graph, [readers[node.name] for node in values], word, name)
        dropped = set(values)
        saved = [word if node is values[0] else node for node in saved if node is values[0] or node not in dropped]
    forward.graph.output_node().args = ((*results[:num_fixed_outputs], *saved),)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, and the same names, metadata and attributes."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    output.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def _words(
    saved: list[fx.Node], readers: Mapping[str, fx.Node], facts: Mapping[str, Fact]
) -> list[tuple[fx.Node, ...]]:
    """Groups of saved 0/1 tensors of one shape, layout and device, in their order, each of which fits a word."""
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in dict.fromkeys(saved):
        if isinstance(node, fx.Node) and node.name in readers and saved.count(node) == 1 and _is_binary(node, facts):
            value = node.meta["val"]
            alike[tuple(value.shape), value.stride(), value.device].append(node)
    groups = (tuple(nodes[start : start + BITS]) for nodes in alike.values() for start in range(0, len(nodes), BITS))
    return [group for group in groups if _gains([node.meta["val"] for node in group])]


def _gains(values: list[torch.Tensor]) -> bool:
    """Whether a word is smaller than its values, or faster to write and read."""
    slow = values[0].device.type == "cpu" and any(value.dtype is torch.bool for value in values)
    return slow or sum(value.dtype.itemsize for value in values) > WORD.itemsize


def _is_binary(node: fx.Node, facts: Mapping[str, Fact]) -> bool:
    value = node.meta.get("val")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor) or value.dtype not in FOLLOWED:
        return False
    fact = facts.get(node.name)
    concrete = all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return concrete and fact is not None and fact.binary and fact.dtype == value.dtype


def _pack(graph: fx.Graph, values: tuple[fx.Node, ...], name: str) -> fx.Node:
    """A word whose bit t is values[t]. Each is added right behind it, so that no value waits for the others."""
    word: fx.Node | None = None
    for node in (node for node in list(graph.nodes) if node in values):
        with graph.inserting_before(node.next):
            bit = call(graph, CONVERT, node, WIDE)
            if place := values.index(node):
                bit = call(graph, aten.bitwise_left_shift.Tensor_Scalar, bit, place)
            word = bit if word is None else call(graph, aten.bitwise_or.Tensor, word, bit)
    if word is None:
        raise AssertionError("a word has values")
    with graph.inserting_before(word.next):
        packed = call(graph, CONVERT, word, WORD)
        packed.name = name
        return packed


def _unpack(graph: fx.Graph, values: list[fx.Node], word: fx.Node, name: str) -> None:
    """Replace the placeholders of the values by one of the word; each value is unpacked where it is first read."""
    with graph.inserting_before(values[0]):
        packed = graph.create_node("placeholder", name, name=name)
    packed.meta = {"val": word.meta["val"]}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for place, node in enumerate(values):
        if node.users:
            with graph.inserting_before(min(node.users, key=order.__getitem__)):
                bit = call(graph, CONVERT, packed, WIDE)
                if place:
                    bit = call(graph, aten.bitwise_right_shift.Tensor_Scalar, bit, place)
                bit = call(graph, aten.bitwise_and.Scalar, bit, 1)
                node.replace_all_uses_with(call(graph, CONVERT, bit, node.meta["val"].dtype))
        graph.erase_node(node)
