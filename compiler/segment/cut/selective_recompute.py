"""A thinner tape: fewer of the values that a forward saves, from which its backward makes the others again.

The forward stays what it is, so every run of a segment is the same. Its thin tape is a part of its tape; the backward
of that begins with the operations of the forward that lead from what is kept to what is not. Beside pointwise work,
products with weights and convolutions are repeated: they take most of the bytes of a block, and little time for each.
Attention is kept, as are random numbers and reductions. So is all from which the backward decides (which side of a
kink, which element is the largest): what the forward decided is never decided again from values that were made twice.

The idea is that of selective recomputation: Korthikanti et al. (2022), arXiv 2205.05198, section 5, which repeats
attention and keeps the products. Here it is the other way round, as fused attention saves next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import fx

from reroll.graph.editing import ancestors
from reroll.graph.memory import origin, storage_nbytes
from reroll.graph.private import LazyGraphModule, operator_name
from reroll.graph.work import work
from reroll.operations import named
from reroll.segment.cut.partition import decided_by, gathered_from, may_recompute, minimum_cut, saved_nbytes

_PART = 0.7  # of the bytes of the tape: a tape that is hardly thinner is not worth its repeats


@dataclass(frozen=True, slots=True, eq=False)
class Thin:
    """A thinner tape and its backward.

    ``keeps`` are the values of the tape that stay, by their number among what the forward saves; the last of them may
    be numbers behind these, which the forward has to give besides: its inputs ``more``, by their number. ``backward``
    takes what is kept, then what the backward of the whole tape takes behind its ``whole`` saved values. ``work`` is
    what it does more than that one, as ``reroll.graph.work`` counts.
    """

    keeps: tuple[int, ...]
    more: tuple[int, ...]
    whole: int
    backward: fx.GraphModule
    work: float


def thinner(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, free: range) -> Thin | None:
    """The thinnest tape of two halves, of which the forward gives ``outputs`` before what it saves; None if that holds
    nearly as much. free: numbers of the forward's inputs that stay alive anyway."""
    results: Any = forward.graph.output_node().args[0]
    saved: list[fx.Node] = list(results[outputs:])
    operands = forward.graph.find_nodes(op="placeholder")
    readers = dict(zip(saved, backward.graph.find_nodes(op="placeholder"), strict=False))
    if len(readers) != len(saved):
        return None
    decided = _decided_from(backward.graph)
    costs = dict.fromkeys(forward.graph.nodes, float("inf"))
    costs |= {node: saved_nbytes(node) for node in (*saved, *operands)}
    costs |= {operands[number]: 0.0 for number in free}
    fixed = {node for node, reader in readers.items() if reader in decided}
    alive = {operands[number] for number in free}
    gathered = gathered_from(forward.graph, alive)
    cut = minimum_cut(
        forward.graph,
        set(saved),
        costs,
        lambda node: node not in fixed and (node in gathered or _may_repeat(node)),
        set(),
    )
    if _nbytes(cut, alive) > _PART * _nbytes(saved, alive):
        return None
    there = set(map(origin, cut))
    kept = [node for node in saved if node in set(cut) or origin(node) in there]
    inputs = [node for node in cut if node not in readers]
    made = _repeating(forward, backward, readers, [*kept, *inputs])
    numbers = (*map(saved.index, kept), *range(len(saved), len(saved) + len(inputs)))
    more = tuple(map(operands.index, inputs))
    return Thin(numbers, more, len(saved), made, work(made.graph) - work(backward.graph))


def _nbytes(nodes: Iterable[fx.Node], alive: set[fx.Node]) -> int:
    """Bytes of the memory that values hold: all of what they are views of, once, but for what is alive anyway."""
    return sum(storage_nbytes(node.meta.get("val")) for node in set(map(origin, nodes)) - alive)


def _may_repeat(node: fx.Node) -> bool:
    known = named(operator_name(node))
    repeated = node.op == "call_function" and (known.product or known.norm == "rows")
    return not decided_by(node) and (may_recompute(node) or bool(repeated))


def _decided_from(graph: fx.Graph) -> set[fx.Node]:
    """All from which a decision of a graph is made."""
    return ancestors([source for node in graph.nodes for source in decided_by(node)])


def _repeating(
    forward: fx.GraphModule, backward: fx.GraphModule, readers: dict[fx.Node, fx.Node], kept: list[fx.Node]
) -> fx.GraphModule:
    """A backward that takes the values ``kept`` of the forward, and makes each other one that it reads right before."""
    new, made, own = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in kept:
        made[node] = new.placeholder(readers.get(node, node).name)
        made[node].meta = dict(readers.get(node, node).meta)
    makers = {reader: node for node, reader in readers.items()}
    for node in backward.graph.nodes:
        if node in makers:
            continue
        for reader in (source for source in node.all_input_nodes if source in makers and source not in own):
            for each in _on_the_way(forward.graph, makers[reader], made):
                made[each] = new.node_copy(each, made.__getitem__)
            own[reader] = made[makers[reader]]
        own[node] = new.node_copy(node, own.__getitem__)
    new.lint()
    names = {node.target for node in new.nodes if node.op in ("get_attr", "call_module")}
    holds = {str(name): attrgetter(str(name))(_holder(str(name), forward, backward)) for name in names}
    return LazyGraphModule(holds, new)


def _on_the_way(graph: fx.Graph, wanted: fx.Node, made: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """What is to be made for a value, in order, beside what is there."""
    missing = ancestors([wanted], made)
    return (node for node in graph.nodes if node in missing and node not in made)


def _holder(name: str, *modules: fx.GraphModule) -> fx.GraphModule:
    return next(each for each in modules if hasattr(each, name.partition(".")[0]))
