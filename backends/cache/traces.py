"""Traced segments on disk: the joint graph of a segment, prepared for inductor, from one process to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from reroll.backends.cache.entries import Unkept, find, ignore, keep, unkept
from reroll.backends.cache.settings import settings
from reroll.backends.cache.steps import refuse_users_operator, step_text, tensor_text
from reroll.backends.cache.table import BROKEN, LEFT_OUT, PARTS, read_back, written
from reroll.graph.fakes import outside_dynamo
from reroll.graph.nested import leaves_of
from reroll.graph.private import is_overload, storage_id
from reroll.recurrence import Items, Numbers, Recurrence, Slices
from reroll.segment.linear.steps import LINEAR
from reroll.segment.trace import Traced, constant_names, trace_inputs, trace_mode

KIND = "traces"


def trace_key(recurrence: Recurrence, steps: int) -> str | None:
    """Everything that the trace of a segment for inductor depends on, as a text; None where no text says all of it."""
    try:
        return _key(recurrence, steps)
    except Unkept as reason:
        unkept(reason)
        return None


def _key(recurrence: Recurrence, steps: int) -> str:
    mode = trace_mode()
    with outside_dynamo(mode), recurrence.modes():
        inputs = [tensor_text(value) for value in trace_inputs(recurrence, mode, steps)]
    reads = [way_of_reading(x) for x in recurrence.xs]
    sizes = (steps, len(recurrence.carries), len(recurrence.constants), len(recurrence.ys))
    names = constant_names(recurrence)
    modes = (recurrence.autocast, recurrence.grad_enabled, bool(recurrence.step.meta.get(LINEAR)))
    devices = {value.device for value in recurrence.examples}
    return "\n".join([step_text(recurrence.step), repr((sizes, reads, names, inputs, modes)), settings(devices)])


def way_of_reading(x: Slices | Items | Numbers) -> tuple[Any, ...]:
    """How a step reads an input out of those of its segment."""
    if isinstance(x, Slices):
        return "slices", x.dim, x.stride > 0
    return ("items",) if isinstance(x, Items) else ("numbers", x.dtype)


def recall(key: str) -> Traced | None:
    """The trace that was kept under a key; None if there is none."""
    payload = find(KIND, key)
    if payload is None:
        return None
    try:
        return read_back(payload, trace_mode())
    except BROKEN as error:
        ignore(KIND, key, f"cannot be read ({type(error).__name__}: {error})")
        return None


def remember(key: str, traced: Traced) -> None:
    """Keep a trace, if it can be written and what is read back is the same."""
    try:
        keep(KIND, key, _checked(traced))
    except Unkept as reason:
        unkept(reason)


def _checked(traced: Traced) -> bytes:
    for node in traced.graph.graph.nodes:
        if is_overload(node.target):
            refuse_users_operator(node.target)
    payload = written(traced)
    try:
        found = trace_text(read_back(payload, trace_mode()))
    except BROKEN as error:
        raise Unkept(f"a trace cannot be read back ({type(error).__name__}: {error})") from error
    if found != trace_text(traced):
        raise Unkept("a trace that was read back is another one")
    return payload


def trace_text(traced: Traced) -> str:
    """A trace as text: each node with its operands, its result, and which memory that lies in."""
    memories: dict[int, int] = {}
    values = [_values(node.meta.get("val"), memories) for node in traced.graph.graph.nodes]
    lines = [
        f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {value} {sorted(_marks(node))}"
        for node, value in zip(traced.graph.graph.nodes, values, strict=True)
    ]
    numbers = [getattr(traced, name) for name in PARTS if name != "results"]
    return "\n".join([*lines, repr(numbers), *map(tensor_text, traced.results)])


def _values(value: Any, memories: dict[int, int]) -> str:
    """Tensors as text, with the number of the memory of each among all that came before."""
    return repr([_with_memory(leaf, memories) for leaf in leaves_of(value)])


def _with_memory(leaf: Any, memories: dict[int, int]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return tensor_text(leaf), memories.setdefault(storage_id(leaf), len(memories))


def _marks(node: fx.Node) -> Iterator[str]:
    """What else is noted of a node, by name, as text where that says it all."""
    for name, value in node.meta.items():
        if name not in ("val", *LEFT_OUT):
            yield f"{name}={value}" if isinstance(value, (bool, int, float, str, tuple)) else name
