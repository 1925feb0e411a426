"""Cut a joint graph into a forward and a backward, saving the fewest bytes: a minimum cut over what may be recomputed.

The capacity of a value is its size as it would be kept (a value proved to be 0/1 takes one bit), the source feeds what
cannot be recomputed, the sink takes what the backward reads (Chen et al., arXiv 1604.06174, as a min-cut in the
manner of torch's partitioner). Comparisons and roundings are never recomputed: a decision taken in the forward is kept.
Nor are reductions and random numbers, nor products, unless products are *replayed*: where what the
recurrence hands on is small once compressed, as spikes are, it is kept, and all the products of a segment can be
repeated at a time. Nothing is decided again. What a user asks to keep is cut out at no choice, and what is to be
repeated is infinitely dear to save (``reroll.segment.cut.policy``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx as nx
import torch
from torch import fx

from reroll.graph.editing import KNOWN, LAYOUTS, ancestors, aten, levels, primals_and_tangents
from reroll.graph.memory import origin
from reroll.graph.private import LazyGraphModule, is_overload, operator_name
from reroll.operations import named, of
from reroll.segment.cut.policy import Policy, StepValue, forward_values, values_of
from reroll.segment.products import products, rows
from reroll.segment.sparsity import Fact, infer

_GATHERS = ("all_gather_into_tensor", "wait_tensor")
_LATER_IS_CHEAPER = 10**7  # parts of a cost, one less for each node before
_DECIDED = "is a decision (a comparison, rounding or index), and what the forward decided is never decided again"


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The two halves of a joint graph.

    ``forward`` gives its outputs, then the saved values; ``backward`` takes the saved values, then the gradients of the
    outputs. ``facts`` holds what is proved of forward values without assumptions. ``tape`` are the saved values but for
    inputs that stay alive anyway. ``kept`` bytes are saved; ``plain`` bytes would be if nothing were repeated or
    packed, as plain BPTT does.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]
    facts: dict[str, Fact]
    tape: tuple[StepValue, ...]
    kept: float
    plain: float


def partition(
    joint: fx.GraphModule, outputs: int, held: set[int], policy: Policy, *, pack: bool, replay: bool = False
) -> Cut:
    """Cut a joint graph with ``outputs`` forward outputs.

    held: numbers of inputs that stay alive anyway, so that saving them is free. pack: whether values proved 0/1 are
    kept in bits. Pointwise work, views and casts may be repeated in the backward; with ``replay`` products with weights
    too, from rows that are kept, so that none of them waits for another. Raises OptionError for a policy that cannot be
    followed.
    """
    graph = joint.graph
    results: Any = graph.output_node().args[0]
    primals, tangents = primals_and_tangents(graph)
    late = _depends_on(graph, tangents)
    facts = infer(graph, {}) if pack else {}
    needed = _needed_values(results[outputs:], late)
    free = {primals[index] for index in held}
    rules = _Rules.of(policy, graph, outputs, free)
    costs = {node: 0.0 if node in free else saved_nbytes(node, facts) for node in graph.nodes if node not in late}
    costs |= dict.fromkeys(rules.unsaved - late, float("inf"))
    if replay:
        saved = _replayed(graph, needed, late, costs, rules)
    else:
        saved = minimum_cut(graph, needed, costs, rules.allow, rules.kept)
    forward = sub_graph(joint, primals, [*results[:outputs], *saved])
    backward = sub_graph(joint, [*saved, *tangents], list(results[outputs:]), drop_none=True)
    return Cut(
        forward,
        backward,
        saved=tuple(node.name for node in saved),
        facts={node.name: fact for node, fact in facts.items()},
        tape=tuple(next(values_of(node)) for node in saved if origin(node) not in free),
        kept=sum(costs[node] for node in saved),
        plain=sum(saved_nbytes(node) for node in _read_of(ancestors(results[:outputs]), needed) - free),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """What may be recomputed: not ``kept``, but all of ``again``; what ``unsaved`` holds may not be saved.

    ``gathered`` are parameters that lie in parts in several processes, as they are gathered from what stays alive.
    """

    policy: Policy
    kept: set[fx.Node]
    again: set[fx.Node]
    unsaved: set[fx.Node]
    gathered: set[fx.Node]

    @classmethod
    def of(cls, policy: Policy, graph: fx.Graph, outputs: int, free: set[fx.Node]) -> _Rules:
        gathered = gathered_from(graph, free)
        if not policy:
            return cls(policy, set(), set(), set(), gathered)
        results: Any = graph.output_node().args[0]
        kept, again = policy.ruled(forward_values(graph, outputs))
        again |= set(map(_made_by, again))
        forward = ancestors([node for node in results[:outputs] if isinstance(node, fx.Node)])
        return cls(policy, kept, again, _with_copies(graph, again, forward) - kept, gathered)

    def allow(self, node: fx.Node) -> bool:
        """Whether a value that the backward is made of may be recomputed. Raises OptionError if it must and cannot."""
        if node in self.kept:
            return False
        reason = _why_refused(node) if node in self.again else ""
        if reason:
            self.policy.refuse(node, reason)
        return node in self.again or node in self.gathered or may_recompute(node)


def gathered_from(graph: fx.Graph, free: set[fx.Node]) -> set[fx.Node]:
    """What is gathered from several processes of ``free`` inputs alone, and casts and views of these: parts that each
    process holds anyway. Whoever keeps it keeps all of them, so it is gathered again; all processes do so alike."""
    found = set(free)
    for node in graph.nodes:
        name = operator_name(node)
        sources = node.all_input_nodes
        if sources and found.issuperset(sources) and (name in _GATHERS or may_recompute(node)):
            found.add(node)
    return found - free


def _with_copies(graph: fx.Graph, again: set[fx.Node], forward: set[fx.Node]) -> set[fx.Node]:
    """Values, their views and copies, and what the backward alone makes of them: who saves these saves the values."""
    found = set(again)
    for node in graph.nodes:
        same = origin(node) is not node or getattr(node.target, "overloadpacket", None) is aten.clone
        derived = any(source in found for source in node.all_input_nodes)
        if derived and (same or node not in forward) and may_recompute(node):
            found.add(node)
    return found


def _replayed(
    graph: fx.Graph, needed: set[fx.Node], late: set[fx.Node], costs: dict[fx.Node, float], rules: _Rules
) -> list[fx.Node]:
    """What to save where products are repeated.

    First the values are found from which the rows of products that come after another one with the same weight can be
    made without products; then the least is saved from which all that is needed can be made, none of these again.
    """
    early = [[node for node in group if node not in late] for group in products(graph)]
    behind: set[fx.Node] = set()
    for group in early:
        level = levels(graph, set(group))
        behind |= {rows(node) for node in group if level[node]}
    given = set(minimum_cut(graph, behind, costs, rules.allow, rules.kept))
    again = {node for group in early for node in group} - rules.kept
    return minimum_cut(
        graph, needed, costs, lambda node: node not in given and (node in again or rules.allow(node)), rules.kept
    )


def _depends_on(graph: fx.Graph, sources: list[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _needed_values(grads: Any, late: set[fx.Node]) -> set[fx.Node]:
    """Forward values that the backward reads; the branches of a ``torch.cond`` (get_attr) are no values."""
    wanted = {node for node in late if node.op != "placeholder"}
    early = {source for node in wanted for source in node.all_input_nodes if source not in late}
    early |= {grad for grad in grads if isinstance(grad, fx.Node) and grad not in late}
    return {node for node in early if node.op != "get_attr"}


def _read_of(forward: set[fx.Node], needed: Iterable[fx.Node]) -> set[fx.Node]:
    """The values of a forward from which ``needed`` is made: no views, no derivatives that need no gradient."""
    values = {node for node in forward if not getattr(node.target, "is_view", False)}
    return ancestors(needed, values) & values


def decided_by(node: fx.Node) -> list[fx.Node]:
    """The operands by which an operation decides: it compares or rounds them, jumps, or is the gradient of what has a
    kink. What is not torch's may decide by all."""
    known = named(operator_name(node))
    own = node.target is not operator.getitem and getattr(node.target, "namespace", "") not in KNOWN
    if node.op != "call_function" or not (own or known.decision or known.kinked or _cuts_off(node)):
        return []
    return node.all_input_nodes[1:] if known.kinked else node.all_input_nodes  # the first is a gradient


def may_recompute(node: fx.Node) -> bool:
    """Whether a value is so cheap to make that it may be made twice, and no decision: pointwise work, views, casts."""
    target: Any = node.target
    if target is operator.getitem:
        return not _cuts_off(node)
    if _why_fixed(node):
        return False
    return target.is_view or of(target).cheap or torch.Tag.pointwise in target.tags


def _why_fixed(node: fx.Node) -> str:
    """Why what a node computes may never be computed twice; empty if it may."""
    target: Any = node.target
    if node.op != "call_function" or not is_overload(target):
        return "is made by an operation that runs a function of the user's"
    if named(operator_name(node)).decides or _cuts_off(node):
        return _DECIDED
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "is made of random numbers, which would be others"
    return "reads memory as it lies" if target.overloadpacket in LAYOUTS else ""


def _why_refused(node: fx.Node) -> str:
    """Why a user's wish that a value be recomputed cannot be followed; empty if it can."""
    target: Any = _made_by(node).target
    if origin(node).op == "placeholder":
        return "is an input of the step, which is there without a tape"
    if is_overload(target) and target.namespace not in KNOWN:
        return "is made by an operation that is not torch's, which may do more than compute"
    return _DECIDED if _cuts_off(node) else _why_fixed(_made_by(node))


def _made_by(node: fx.Node) -> fx.Node:
    """The call that makes a value, itself or as one of several."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _cuts_off(node: fx.Node) -> bool:
    """Whether a node makes whole numbers or truth values of others: a cast, indices, or a division that rounds."""
    made = node.meta.get("val")
    sources = [source.meta.get("val") for source in _made_by(node).all_input_nodes]
    whole = isinstance(made, torch.Tensor) and not _continuous(made)
    return "rounding_mode" in node.kwargs or (whole and any(_continuous(source) for source in sources))


def _continuous(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def saved_nbytes(node: fx.Node, facts: Mapping[fx.Node, Fact] = MappingProxyType({})) -> float:
    """Bytes of a value as it is saved: in bits if it is known to be 0 or 1, given any ``facts``. Infinite if it is no
    tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return float("inf")
    fact = facts.get(node)
    bits = value.dtype is torch.bool or (fact is not None and fact.codec == "bits")
    return value.numel() / 8 if bits and facts else float(value.numel() * value.element_size())


def minimum_cut(
    graph: fx.Graph,
    needed: set[fx.Node],
    costs: dict[fx.Node, float],
    may_recompute: Callable[[fx.Node], bool],
    kept: set[fx.Node],
) -> list[fx.Node]:
    """The cheapest values from which ``needed`` can be made again, with all of ``kept`` that it is made of.

    Costs are whole numbers of bits here: with rounding, equally cheap cuts were told apart by the order of sets.
    """
    network, order = nx.DiGraph(), {node: index for index, node in enumerate(graph.nodes)}
    todo, seen = list(needed), set(needed)
    while todo:
        node = todo.pop()
        network.add_edge((node, "in"), (node, "out"))
        if costs[node] < float("inf"):
            network[node, "in"][node, "out"]["capacity"] = round(8 * costs[node]) * (_LATER_IS_CHEAPER - order[node])
        if node in needed or node in kept:
            network.add_edge((node, "out"), "sink")
        if not may_recompute(node):
            network.add_edge("source", (node, "in"))
            continue
        sources = [s for s in node.all_input_nodes if s.op != "get_attr"]
        for source in sources:
            network.add_edge((source, "out"), (node, "in"))
            if source not in seen:
                seen.add(source)
                todo.append(source)
    if "source" not in network or "sink" not in network:
        return []
    _, (reached, _) = nx.minimum_cut(network, "source", "sink")
    cut = {n for n in seen if (n, "in") in reached and (n, "out") not in reached}
    return sorted(cut, key=lambda node: order[node])


def sub_graph(
    joint: fx.GraphModule, inputs: list[fx.Node], outputs: list[Any], drop_none: bool = False
) -> fx.GraphModule:
    """The part of a graph that computes ``outputs`` from ``inputs``, in the original order."""
    new, env = fx.Graph(), {}
    for node in inputs:
        env[node] = new.placeholder(node.name)
        env[node].meta = dict(node.meta)
    wanted = ancestors([node for node in outputs if isinstance(node, fx.Node)], env)
    for node in joint.graph.nodes:
        if node in wanted and node not in env:
            env[node] = new.node_copy(node, env.__getitem__)
    kept = [node for node in outputs if node is not None or not drop_none]
    new.output(tuple(env[node] if isinstance(node, fx.Node) else node for node in kept))
    new.lint()
    return LazyGraphModule(joint, new)
