"""A trace as a table of plain data: JSON, of which reading runs nothing.

A line for each node: its name, what it calls, its operands, what is noted of it. A tensor is its layout and the number
of its memory. What is neither is one entry, its kind: ``{"dtype": "float32"}``. A trace calls operators of torch's and
ours by their names, and ``getitem``; there is no way to write down any other function, so none is found here.

Private torch API, tried on 2.11 and 2.13: ``FakeTensor`` (of a tensor on the meta device) and ``FakeTensorMode``,
``OpOverload`` of ``torch._ops``, ``TensorMetadata`` (what ``make_fx`` notes of a value), ``_neg_view`` (a tensor whose
sign is a mark).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.shape_prop import TensorMetadata

from reroll.backends.cache.entries import Unkept
from reroll.graph.private import storage_id
from reroll.segment.sparsity import Fact
from reroll.segment.trace import Traced

LEFT_OUT = frozenset(
    {"stack_trace", "nn_module_stack", "source_fn_stack", "fwd_nn_module_stack", "fwd_source_fn_stack", "desc"}
)
"""What is noted of a node and not kept: where it stands in the user's code."""
PARTS = tuple(each.name for each in fields(Traced) if each.name not in ("graph", "mode"))
"""What a trace is beside its graph and the mode of its tensors."""

BROKEN = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
"""What reading a table raises that nobody wrote here."""

_PLAIN = (type(None), bool, int, float, str)
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_OPERATOR = re.compile(r"(aten|prims|reroll)\.(\w+)\.(\w+)", re.ASCII)
_GETITEM = "getitem"


def written(traced: Traced) -> bytes:
    """A trace as bytes. Raises Unkept for one that holds what no plain data says."""
    writer = _Writer({node: place for place, node in enumerate(traced.graph.graph.nodes)})
    table = {
        "nodes": [writer.line(node) for node in traced.graph.graph.nodes],
        "parts": [writer.plain(getattr(traced, name)) for name in PARTS],
        "memories": writer.memories,
    }
    return json.dumps(table).encode()


def read_back(payload: bytes, mode: FakeTensorMode) -> Traced:
    """The trace that was written, with its tensors in a mode. Raises one of ``BROKEN`` for what is none."""
    table = json.loads(payload)
    reader = _reader(table, mode)
    graph = reader.graph(table["nodes"])
    parts = dict(zip(PARTS, map(reader.value, table["parts"]), strict=True))
    return Traced(graph=graph, mode=mode, **parts)


def half_written(half: fx.GraphModule) -> dict[str, Any]:
    """The graph of a half, with examples of its values, as JSON has it. Raises Unkept as ``written`` does."""
    writer = _Writer({node: place for place, node in enumerate(half.graph.nodes)})
    nodes = [writer.line(node, ["val"]) for node in half.graph.nodes]
    return {"nodes": nodes, "memories": writer.memories}


def half_read(table: Any, mode: FakeTensorMode) -> fx.GraphModule:
    """The half that was written, with its examples in a mode."""
    return _reader(table, mode).graph(table["nodes"])


def _reader(table: Any, mode: FakeTensorMode) -> _Reader:
    return _Reader([], [_memory(nbytes, device) for nbytes, device in table["memories"]], mode)


@dataclass(slots=True)
class _Writer:
    """What was written so far: the place of each node, and each memory, with its number by its identity."""

    places: Mapping[fx.Node, int]
    memories: list[tuple[int, str]] = field(default_factory=list)  # bytes, device
    numbers: dict[int, int] = field(default_factory=dict)

    def line(self, node: fx.Node, noted: Collection[str] | None = None) -> list[Any]:
        """A node, with all that is noted of it, or only with some of that."""
        operands = self.plain(node.args), {name: self.plain(value) for name, value in node.kwargs.items()}
        names = {*node.meta} - LEFT_OUT if noted is None else noted
        notes = {name: self.plain(value) for name, value in node.meta.items() if name in names}
        return [node.name, node.op, _name_of(node), *operands, notes]

    def plain(self, value: Any) -> Any:
        """A value as JSON has it, or as one entry: its kind, and what it is."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, list):
            return [self.plain(each) for each in value]
        if kind in _NAMED:
            return {_NAMED[kind]: str(value).removeprefix("torch.")}
        if isinstance(value, FakeTensor):
            return {"tensor": self._layout(value)}
        if isinstance(value, fx.Node):
            return {"node": self.places[value]}
        if isinstance(value, OpOverload):
            return {"operator": str(value)}
        for name, (of, parts, _) in _KINDS.items():
            if kind is of:
                return {name: [self.plain(each) for each in parts(value)]}
        raise Unkept(f"a trace holds {kind.__name__}")

    def _layout(self, value: Tensor) -> list[Any]:
        """All that a tensor is but its values."""
        identity = storage_id(value)
        if identity not in self.numbers:
            self.numbers[identity] = len(self.memories)
            self.memories.append((value.untyped_storage().nbytes(), str(value.device)))
        sizes = list(value.shape), list(value.stride()), value.storage_offset()
        marks = value.requires_grad, value.is_conj(), value.is_neg()
        return [self.numbers[identity], *sizes, self.plain(value.dtype), *marks]


@dataclass(frozen=True, slots=True)
class _Reader:
    """What was read so far: the nodes, and the memories, on the meta device, with the devices that they are on."""

    nodes: list[fx.Node]
    memories: list[tuple[Tensor, torch.device]]
    mode: FakeTensorMode

    def graph(self, lines: Any) -> fx.GraphModule:
        """The graph that was written, line by line."""
        graph = fx.Graph()
        for name, kind, called, args, kwargs, notes in lines:
            operands = self.value(args), {key: self.value(each) for key, each in kwargs.items()}
            node = graph.create_node(kind, _called(kind, called), *operands, name=name)
            node.meta = {key: self.value(each) for key, each in notes.items()}
            self.nodes.append(node)
        return fx.GraphModule({}, graph)

    def value(self, written: Any) -> Any:
        """What was written."""
        if isinstance(written, list):
            return [self.value(each) for each in written]
        if not isinstance(written, dict):
            return written
        ((kind, told),) = written.items()
        if kind == "node":
            return self.nodes[told]
        if kind == "tensor":
            return self._tensor(*told)
        if kind == "operator":
            return _operator(told)
        if kind in _NAMED.values():
            return _named(kind, told)
        return _KINDS[kind].made(self.value(told))

    def _tensor(
        self, memory: int, sizes: Any, strides: Any, offset: int, dtype: Any, needs: bool, conj: bool, neg: bool
    ) -> Tensor:
        (base, device), wanted = self.memories[memory], self.value(dtype)
        whole = base.numel() // wanted.itemsize * wanted.itemsize
        made = base[:whole].view(wanted).as_strided(sizes, strides, offset)
        made = made.conj() if conj else made
        made = torch._neg_view(made) if neg else made
        return FakeTensor(self.mode, made.detach(), device).requires_grad_(needs)


def _memory(nbytes: int, device: str) -> tuple[Tensor, torch.device]:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta"), torch.device(device)


def _name_of(node: fx.Node) -> str:
    """What a node calls. Raises Unkept for what is not torch's own, or ours."""
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op == "call_function" and node.target is operator.getitem:
        return _GETITEM
    if node.op == "call_function" and _OPERATOR.fullmatch(str(node.target)):
        return str(node.target)
    raise Unkept(f"a trace {'calls' if node.op == 'call_function' else 'holds'} {node.target}")


def _called(kind: str, name: str) -> Any:
    if kind in ("placeholder", "output"):
        return name
    if kind != "call_function":
        raise ValueError(f"{kind} {name} in a trace")
    return operator.getitem if name == _GETITEM else _operator(name)


def _operator(name: str) -> OpOverload:
    """An operator by its name, if it is torch's own or ours."""
    found = _OPERATOR.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no operator of a trace")
    space, operation, overload = found.groups()
    packet = getattr(getattr(torch.ops, space), operation)
    made = getattr(packet, overload) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(made, OpOverload) or str(made) != name:
        raise ValueError(f"{name} is no operator of a trace")
    return made


def _named(kind: str, name: str) -> Any:
    """A dtype, a layout or a memory format."""
    found = getattr(torch, name)
    if _NAMED.get(type(found)) != kind:
        raise ValueError(f"{name} is no {kind}")
    return found


class _Kind(NamedTuple):
    """A kind of value: its type, the parts that say all of it, and how it is made of them."""

    of: type
    parts: Callable[[Any], Iterable[Any]]
    made: Callable[[list[Any]], Any]


_KINDS = {
    "tuple": _Kind(tuple, tuple, tuple),
    "size": _Kind(torch.Size, tuple, torch.Size),
    "set": _Kind(frozenset, sorted, frozenset),
    "dict": _Kind(dict, lambda value: map(list, value.items()), dict),
    "slice": _Kind(slice, lambda value: (value.start, value.stop, value.step), lambda parts: slice(*parts)),
    "complex": _Kind(complex, lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    "device": _Kind(torch.device, lambda value: (str(value),), lambda parts: torch.device(*parts)),
    "metadata": _Kind(TensorMetadata, tuple, lambda parts: TensorMetadata(*parts)),
    "fact": _Kind(Fact, lambda value: (value.dtype, value.patterns, value.low, value.high), lambda parts: Fact(*parts)),
}
