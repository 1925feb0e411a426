"""Editing fx graphs: operands, nodes with their values, equal nodes made one, nodes in a valid order, equal content."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.effects import attribute, gradient_sources, has_effect, is_random, is_torchs, operation
from reroll.graph.names import add_names, names_of
from reroll.graph.private import is_higher_order, is_mutable, is_overload, map_aggregate
from reroll.operations import placed, torchs_arguments

aten = torch.ops.aten
LAYOUTS = (aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter)
KNOWN = ("aten", "prims", "reroll")


_SMALL_TENSOR = 1 << 16


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the point of insertion, with its value under the fake mode of its operands."""
    node: fx.Node = graph.create_node("call_function", target, args, kwargs)
    with torch.no_grad():
        values: Any = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
    return node


def add_input(graph: fx.Graph, name: str, like: Tensor | None, names: tuple[str, ...] = ()) -> fx.Node:
    """A new placeholder with its example and the names that a user gave its value; its target is the name it gets."""
    node = graph.placeholder(name)
    node.target = node.name
    node.meta["example_value"] = like
    add_names(node, names)
    return node


def inserting_after(graph: fx.Graph, operands: Iterable[fx.Node]) -> AbstractContextManager[Any]:
    """New nodes go behind all of these, and behind the placeholders. Nodes that read them may need a ``sort``."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    placeholders = graph.find_nodes(op="placeholder")
    last = max([*operands, *placeholders], key=order.__getitem__)
    place: AbstractContextManager[Any] = graph.inserting_before(last.next)
    return place


def constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on nothing but what is the same at all steps: weights, and what is made of them."""
    found = {node for node in graph.find_nodes(op="placeholder") if node.meta.get("constant")}
    for node in graph.nodes:
        fixed = node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes)
        if fixed and not _may_draw(node.target):
            found.add(node)
    return found


def shape(node: Any) -> tuple[int, ...] | None:
    """The shape of a node's tensor; None if it has none, or one that is not all numbers."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def name_arguments(graph: fx.Graph) -> None:
    """Arguments that are spelled as numpy spells them get torch's names, and those of a part (``torch.select``) their
    places, where they are looked for."""
    for node in graph.nodes:
        known = operation(node)
        if not node.kwargs or not known.name:
            continue
        renamed = torchs_arguments(known, node.kwargs)
        node.kwargs = {renamed.get(name, name): value for name, value in node.kwargs.items()}
        if known.view == "part":
            node.args, node.kwargs = placed(known, node.args, node.kwargs)


def sort(graph: fx.Graph) -> None:
    """Order the nodes so that each comes after its operands, and otherwise as they are."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in order}
    ready = [(at, node) for node, at in order.items() if not missing[node]]
    heapq.heapify(ready)
    done: list[fx.Node] = []
    while ready:
        node = heapq.heappop(ready)[1]
        done.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (order[user], user))
    if len(done) != len(order):
        raise AssertionError("a graph has no cycles")
    for before, node in itertools.pairwise(done):
        before.append(node)


def ancestors(nodes: Iterable[fx.Node], stop: Container[fx.Node] = ()) -> set[fx.Node]:
    """The nodes, and all that they are made of; the walk does not go on behind those of ``stop``."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if node in stop else node.all_input_nodes
    return found


def primals_and_tangents(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The placeholders of a joint graph: operands of the forward, and gradients of its results."""
    found = graph.find_nodes(op="placeholder")
    tangents = [node for node in found if "tangents" in str(node.target)]
    return [node for node in found if node not in set(tangents)], tangents


def levels(graph: fx.Graph, group: set[fx.Node]) -> dict[fx.Node, int]:
    """For every node, how many members of a group follow one another on the longest way to it, itself left out."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        found[node] = max((found[source] + (1 if source in group else 0) for source in sources), default=0)
    return found


def reads_memory(graph: fx.Graph) -> bool:
    """Whether a node reads memory as it lies, so that no value may be laid out otherwise."""
    return any(getattr(node.target, "overloadpacket", None) in LAYOUTS for node in graph.nodes)


def in_order(graph: fx.Graph) -> bool:
    """Whether nodes must stay in their order: several draw random numbers or may, and which they get depends on it."""
    return len([node for node in graph.nodes if node.op == "call_function" and _may_draw(node.target)]) > 1


def _may_draw(target: Any) -> bool:
    """Whether an operation draws random numbers, or is neither torch's nor ours, so that nobody knows what it does."""
    if not is_overload(target):
        return is_higher_order(target)
    return bool(torch.Tag.nondeterministic_seeded in target.tags) or target.namespace not in KNOWN


def deduplicate(graph: fx.Graph) -> None:
    """Make nodes that compute the same one node; results of the graph stay tensors of their own."""
    results = set(graph.output_node().all_input_nodes)
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node in results or not repeatable(node):
            continue
        key = (node.target, *_frozen((node.args, node.kwargs)))
        first = seen.setdefault(key, node)
        if first is not node:
            add_names(first, names_of(node))
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def repeatable(node: fx.Node) -> bool:
    """Whether a node does nothing but give the same result for the same operands."""
    target: Any = node.target
    if node.op != "call_function" or not is_overload(target) or _may_draw(target):
        return False
    return not is_mutable(target) and bool(node.users)


def _frozen(value: Any) -> Iterator[Any]:
    """A value as hashable items: 1, 1.0 and True are not the same."""
    if isinstance(value, list | tuple):
        yield "("
        for item in value:
            yield from _frozen(item)
        yield ")"
    elif isinstance(value, dict):
        yield from _frozen(tuple(value.items()))
    else:
        yield type(value), value if isinstance(value, fx.Node) else repr(value)


def flatten(node: fx.Node) -> list[Any]:
    """All leaves of a node's operands, in the order of ``rebuild``."""
    leaves: list[Any] = []
    map_aggregate((node.args, node.kwargs), leaves.append)
    return leaves


def rebuild(node: fx.Node, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's operands with other leaves."""
    rest = iter(leaves)
    args, kwargs = map_aggregate((node.args, node.kwargs), lambda _: next(rest))
    return args, kwargs


def content_of(value: Any) -> str:
    """A text that is equal for submodules of equal graphs and for small tensors of equal values."""
    if isinstance(value, fx.GraphModule):
        return module_content(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() <= _SMALL_TENSOR:
        digest = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()
        return repr((tuple(value.shape), value.dtype, value.device, value.requires_grad, digest))
    return f"object {id(value)}"


def module_content(module: fx.GraphModule) -> str:
    """A text that is equal for modules that do the same to their inputs."""
    names: dict[fx.Node, str] = {}
    text = []
    for place, node in enumerate(module.graph.nodes):
        names[node] = f"%{place}"
        if node.op == "get_attr":
            text.append(content_of(attribute(module, node)))
            continue
        operands = map_aggregate((node.args, node.kwargs), _namer(names))
        text.append(repr((node.op, "" if node.op == "placeholder" else str(node.target), operands)))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _namer(names: dict[fx.Node, str]) -> Callable[[Any], Any]:
    return lambda leaf: names[leaf] if isinstance(leaf, fx.Node) else leaf


def merge_duplicates(graph: fx.Graph) -> None:
    """Equal work of one step is done once: same operation, operands, submodules and modes, no random numbers. What is
    not torch's own is done once where a gradient comes to one of the two alone."""
    seen: dict[Any, fx.Node] = {}
    scope, reached = 0, {each for result in graph.output_node().all_input_nodes for each in gradient_sources(result)}
    for node in list(graph.nodes):
        if has_effect(node) and not is_random(node):
            scope += 1
        if has_effect(node) or node.op == "get_attr":
            continue
        parts = [_part(leaf) for leaf in flatten(node)]
        args, kwargs = rebuild(node, parts)
        key = (node.op, node.target, repr((args, kwargs)), scope)
        first = seen.setdefault(key, node)
        if first is node or not (is_torchs(node) or {first, node} - reached):
            continue
        reached |= {first} if node in reached else set()
        add_names(first, names_of(node))
        node.replace_all_uses_with(first)
        graph.erase_node(node)


def _part(leaf: Any) -> Any:
    return ("node", leaf.name) if isinstance(leaf, fx.Node) else leaf


def drop_dead(graph: fx.Graph, stays: Callable[[fx.Node], bool] = has_effect) -> None:
    """Erase nodes that nobody uses and that have no effect, or do not stay for another reason.

    The bodies of functions in the graph are left alone: ``eliminate_dead_code`` goes into these and erases methods
    that update a tensor in place (``v.mul_(...)``) where nobody reads their result.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and not stays(node):
            graph.erase_node(node)
