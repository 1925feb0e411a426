"""Bytes that one run of a graph holds at its worst: a walk over allocations and last uses.

A graph of ATen operations is walked node by node: every result takes its bytes when it is made and gives them back
after its last use, views share the memory of what they look at. Code that inductor wrote has its own plan of
allocations and reuse; it is read off the wrapper's source (the statements ``empty_strided_cpu``,
``reinterpret_tensor``, ``del`` and ``return``).

Inputs count only where the run owns them, that is where it drops the last reference: carries that nobody keeps, and the
saved tensors of a tape.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

_CALLED = re.compile(r"(buf\w+) = [\w.]+\.\w+\(.*\)$")
_ITEM = re.compile(r"(buf\w+) = (buf\w+)\[\d+\]$")
_CHECKED = re.compile(r"assert_size_stride\((buf\w+), (.*), 'torch\.ops\.([\w.]+)'\)$")
_ASSIGNED = re.compile(r"(\w+) = (\w+)\((.*)\)(?:; del (\w+))?$")
_MOVED = re.compile(r"(\w+) = (\w+)(?:; del (\w+))?$")
_COMMENT = re.compile(r"\s+#.*$")


@dataclass(slots=True)
class Ledger:
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


def graph_peak(graph: fx.Graph, owned: Collection[str]) -> int:
    """The most bytes that a boxed run of an ATen graph holds. ``owned`` names the placeholders that die with it."""
    ledger, last = Ledger(), _last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in owned:
                ledger.allocate(node, storage_nbytes(node.meta.get("val")))
        elif node.op == "call_function":
            source = viewed(node)
            if source is None:
                ledger.allocate(node, result_nbytes(node.meta.get("val")))
            else:
                ledger.alias(node, source)
        for dead in last.get(node, ()):
            ledger.drop(dead)
    return ledger.peak


def result_nbytes(value: Any) -> int:
    """Bytes of what an operation gives: a tensor, or several."""
    if isinstance(value, tuple | list):
        return sum(storage_nbytes(item) for item in value)
    return storage_nbytes(value)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node those whose last use it is. What is given back is never dropped."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in (node, *node.all_input_nodes):
            last[source] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for source, user in last.items():
        if user.op != "output":
            dead.setdefault(user, []).append(source)
    return dead


def wrapper_peak(source: str, inputs: Mapping[str, int], itemsizes: Mapping[str, int]) -> int | None:
    """The most bytes that inductor's wrapper holds; None where its source is not of the form that is understood.

    inputs: bytes of each owned input by name; the others take nothing. itemsizes: bytes of an element of the results of
    each operation by name; inductor writes down the shapes of what torch's own kernels give.
    """
    found = re.search(r"^def call\(|^    def call\(", source, re.MULTILINE)
    if found is None or "def partition_" in source:
        return None
    ledger = Ledger()
    for name, nbytes in inputs.items():
        ledger.allocate(name, nbytes)
    for line in source[found.start() :].splitlines()[1:]:
        line = _COMMENT.sub("", line).strip()
        if line.startswith("return "):
            return ledger.peak
        if not _understood(line, ledger, itemsizes):
            return None
    return None


def _understood(line: str, ledger: Ledger, itemsizes: Mapping[str, int]) -> bool:
    """Take account of one statement. False if it binds a buffer in a way that is not known."""
    if match := _CHECKED.fullmatch(line):
        return _given(match[1], match[2], itemsizes.get(match[3]), ledger)
    if _CALLED.fullmatch(line) or _ITEM.fullmatch(line):
        return True  # its size is checked in the next lines
    if line.startswith("del "):
        for name in line[4:].split(","):
            ledger.drop(name.strip())
        return True
    if match := _MOVED.fullmatch(line):
        ledger.alias(match[1], match[2])
        ledger.drop(match[3])
        return True
    if not line.startswith("buf"):
        return True
    match = _ASSIGNED.fullmatch(line)
    if match is None:
        return "=" not in line
    name, called, arguments, moved = match.groups()
    if called.startswith("empty_strided_"):
        ledger.allocate(name, _allocated(arguments))
    elif called == "reinterpret_tensor":
        ledger.alias(name, arguments.split(",")[0].strip())
    else:
        return False
    ledger.drop(moved)
    return True


def _given(name: str, layout: str, itemsize: int | None, ledger: Ledger) -> bool:
    """Take account of what torch's own kernel gave, unless it shares memory that is known. False if it has no size."""
    if itemsize is None:
        return False
    if name not in ledger.names:
        shape, stride = ast.literal_eval(f"({layout})")
        ledger.allocate(name, strided_nbytes(shape, stride, itemsize))
    return True


def _allocated(arguments: str) -> int:
    """Bytes of ``empty_strided_cpu((32, 256), (256, 1), torch.float32)``."""
    sizes, _, dtype = arguments.rpartition(", torch.")
    shape, stride = ast.literal_eval(f"({sizes})")
    return strided_nbytes(shape, stride, getattr(torch, dtype).itemsize)
