"""Bytes that one run of a graph holds at its worst: a walk over allocations and last uses.

A graph of ATen operations is walked node by node: every result takes its bytes when it is made and gives them back
after its last use, views share the memory of what they look at. Code that inductor wrote has its own plan of
allocations and reuse (``reroll.backends.inductor.wrapper_codegen.wrapper``).

Inputs count only where the run owns them, that is where it drops the last reference: carries that nobody keeps, and the
saved tensors of a tape.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx


@dataclass(slots=True)
class Allocations:
    """Blocks of memory and the names that refer to them; a block is freed with its last name."""

    names: dict[Any, int] = field(default_factory=dict)
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # block -> (bytes, names that refer to it)
    held: int = 0
    peak: int = 0

    def allocate(self, name: Any, nbytes: int) -> None:
        """A new block under a name."""
        self.drop(name)
        block = len(self.names) + len(self.blocks)
        while block in self.blocks:
            block += 1
        self.names[name], self.blocks[block] = block, (nbytes, 1)
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def work(self, nbytes: int) -> None:
        """Memory that is there for a moment."""
        self.peak = max(self.peak, self.held + nbytes)

    def own(self, blocks: Owned) -> None:
        """Blocks that are there from the beginning, each under its names."""
        for nbytes, names in blocks:
            self.allocate(names[0], nbytes)
            for name in names[1:]:
                self.alias(name, names[0])

    def alias(self, name: Any, source: Any) -> None:
        """Another name for the block of ``source``; nothing if that is not known."""
        block = self.names.get(source)
        if block is None or name == source:
            return
        nbytes, count = self.blocks[block]
        self.blocks[block] = (nbytes, count + 1)
        self.drop(name)
        self.names[name] = block

    def drop(self, name: Any) -> None:
        """Forget a name."""
        block = self.names.pop(name, None)
        if block is None:
            return
        nbytes, count = self.blocks.pop(block)
        if count > 1:
            self.blocks[block] = (nbytes, count - 1)
        else:
            self.held -= nbytes


def storage_nbytes(value: Any) -> int:
    """Bytes of the memory that a tensor of its own needs, gaps included; 0 for anything else."""
    if not isinstance(value, Tensor):
        return 0
    return strided_nbytes(value.shape, value.stride(), value.dtype.itemsize)


def strided_nbytes(shape: Iterable[int], stride: Iterable[int], itemsize: int) -> int:
    """Bytes of a strided tensor, gaps included."""
    dims = [(int(size), int(step)) for size, step in zip(shape, stride, strict=True)]
    if any(size == 0 for size, _ in dims):
        return 0
    return (1 + sum((size - 1) * step for size, step in dims)) * itemsize


def viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory the result of ``node`` shares, if it makes a view."""
    target: Any = node.target
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if target is operator.getitem:
        return node.all_input_nodes[0]
    is_view = getattr(target, "is_view", False) or str(target).startswith("aten._unsafe_view")
    return node.all_input_nodes[0] if is_view else None


def origin(node: fx.Node) -> fx.Node:
    """The node that gives the memory of a value, through all views: a call, or one of the results of a call."""
    while (source := viewed(node)) is not None and (node.target is not operator.getitem or viewed(source) is not None):
        node = source
    return node


Owned = Sequence[tuple[int, tuple[str, ...]]]
"""Blocks of memory that die with a run: their bytes, and the placeholders that share one."""


Workspaces = Mapping[tuple[str, tuple[int, ...]], int]
"""Bytes in which operations work besides their results, by the name of an operation and the shape of a result."""


def shapes_of(value: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors that an operation gives."""
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, Tensor):
            yield tuple(each.shape)


def graph_peak(
    graph: fx.Graph,
    owned: Owned,
    workspaces: Workspaces = MappingProxyType({}),
    begin: fx.Node | None = None,
) -> int:
    """The most bytes that a boxed run of an ATen graph holds, and works in; from the node ``begin`` on."""
    ledger, last = Allocations(), last_uses(graph)
    ledger.own(owned)
    for node in graph.nodes:
        if node is begin:
            ledger.peak = ledger.held
        if node.op == "call_function":
            _made(ledger, node)
            for shape in shapes_of(node.meta.get("val")):
                ledger.work(workspaces.get((str(node.target), shape), 0))
        for dead in last.get(node, ()):
            for name in _names(dead):
                ledger.drop(name)
    return ledger.peak


def _made(ledger: Allocations, node: fx.Node) -> None:
    """A call's result: memory of its own, each of several results apart, or a view."""
    source, value = viewed(node), node.meta.get("val")
    if source is not None:
        picked = node.target is operator.getitem and isinstance(source.meta.get("val"), tuple | list)
        ledger.alias(node.name, _names(source)[node.args[1]] if picked else source.name)  # type: ignore[index]
        return
    for name, item in zip(_names(node), value if isinstance(value, tuple | list) else (value,), strict=True):
        ledger.allocate(name, storage_nbytes(item))


def _names(node: fx.Node) -> list[str]:
    """The names under which the ledger has the results of a node."""
    value = node.meta.get("val")
    return [f"{node.name}[{at}]" for at in range(len(value))] if isinstance(value, tuple | list) else [node.name]


def result_nbytes(value: Any) -> int:
    """Bytes of what an operation gives: a tensor, or several."""
    if isinstance(value, tuple | list):
        return sum(storage_nbytes(item) for item in value)
    return storage_nbytes(value)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node those whose last use it is, itself if nobody uses it. What the graph gives back is in none."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in (node, *node.all_input_nodes):
            last[source] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for source, user in last.items():
        if user.op != "output":
            dead.setdefault(user, []).append(source)
    return dead
