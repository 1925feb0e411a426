"""A forward as two functions: what a segment saves, and what its outputs alone need.

A forward that runs again right before its backward has outputs that nobody reads: the second function is left out then.
torch's checkpoints do the same by an exception in the forward, "early stopping".
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.graph.editing import KNOWN, ancestors
from reroll.graph.private import is_mutable, is_overload
from reroll.graph.work import work
from reroll.segment.cut.partition import sub_graph

_PART, _LEAST = 0.05, 2**20  # of a forward's work, and bytes moved: less is not worth another call


@dataclass(frozen=True, slots=True, eq=False)
class InTwo:
    """A forward as two graphs, one after the other.

    ``taping`` takes what the forward takes, and gives the ``saved`` values that the forward does, then what ``rest``
    reads besides. ``rest`` gives the outputs; it takes the forward's inputs numbered ``inputs``, then the results of
    ``taping`` numbered ``results``.
    """

    taping: fx.GraphModule
    rest: fx.GraphModule
    saved: int
    inputs: tuple[int, ...]
    results: tuple[int, ...]


def without_outputs(forward: fx.GraphModule, outputs: int) -> InTwo | None:
    """A forward in two, so that its saved values can be made without its ``outputs``; None where that saves little, or
    where what the outputs alone need does more than compute: it draws random numbers, or runs a function of the user's.

    Nothing is computed twice, nor in another way: the last layer of a block, which its backward does not read, is the
    second graph.
    """
    found: Any = forward.graph.output_node().args[0]
    given, saved = list(found[:outputs]), list(found[outputs:])
    early = ancestors(saved)
    early |= {node for node in forward.graph.nodes if node.target is operator.getitem and node.args[0] in early}
    wanted = ancestors(node for node in given if isinstance(node, fx.Node))
    late = {node for node in wanted - early if node.op != "placeholder"}
    if not all(map(_only_computes, late)):
        return None
    reads = {source for node in late for source in node.all_input_nodes} | {n for n in given if isinstance(n, fx.Node)}
    operands = forward.graph.find_nodes(op="placeholder")
    inputs = [node for node in operands if node in reads]
    between = [node for node in forward.graph.nodes if node in reads - late - set(operands)]
    rest = sub_graph(forward, [*inputs, *between], given)
    if work(rest.graph) < max(_PART * work(forward.graph), _LEAST):
        return None
    results = [*saved, *(node for node in between if node not in saved)]
    return InTwo(
        sub_graph(forward, operands, results),
        rest,
        saved=len(saved),
        inputs=tuple(map(operands.index, inputs)),
        results=tuple(map(results.index, between)),
    )


def _only_computes(node: fx.Node) -> bool:
    target: Any = node.target
    if target is operator.getitem:
        return True
    known = node.op == "call_function" and is_overload(target) and target.namespace in KNOWN
    return known and torch.Tag.nondeterministic_seeded not in target.tags and not is_mutable(target)
