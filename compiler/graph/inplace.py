"""Operations that update an operand, one operation that does what they do on copies, and what shares memory."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from reroll.graph.memory import strided_nbytes
from reroll.graph.private import is_overload, overload_name, storage_id, written

_INPLACE_NAMES = {  # of Python's operators that are updates in place of tensors, as ``+=`` is
    name for name in (f"i{each.rstrip('_')}" for each in dir(operator)) if hasattr(torch.Tensor, f"__{name}__")
}
_INPLACE_OPERATORS = {getattr(operator, name) for name in _INPLACE_NAMES if hasattr(operator, name)}
_PYTHONS = (operator.and_, operator.or_, operator.not_, operator.is_)  # named like updates
_OF_ARRAYS = {"__setitem__", "fill", "sort", "put", "partition", "resize"}
_OF_ARRAYS |= {each.__name__ for each in _INPLACE_OPERATORS}
STATISTICS = {
    torch.nn.functional.batch_norm: ("training", ("running_mean", "running_var")),
    torch.nn.functional.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
}
Place = int | str


def storage_of(node: Any) -> int | None:
    """Identity of the memory behind a node's example value; None for what is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def operand(node: fx.Node, place: Place) -> Any:
    """The operand at a position or under a keyword."""
    return node.args[place] if isinstance(place, int) else node.kwargs.get(place)


def updated_places(node: fx.Node) -> tuple[Place, ...]:
    """Which operands of a node it updates in place."""
    if node.op == "call_method":
        name = str(node.target)
        if name.endswith("__"):
            return (0,) if name.strip("_") in _INPLACE_NAMES else ()
        return (0,) if name.endswith("_") and name != "requires_grad_" else ()
    if node.op != "call_function":
        return ()
    places = tuple(_function_updates(node))
    return tuple(place for place in places if storage_of(operand(node, place)) is not None)


def updates_a_list(node: fx.Node) -> bool:
    """Whether a node updates tensors that a list or tuple holds (``torch._foreach_add_``, ``out=(values, indices)``):
    these are no operands of their own."""
    if node.op != "call_function":
        return False
    held = (operand(node, place) for place in _function_updates(node))
    return any(isinstance(each, list | tuple) and any(isinstance(x, fx.Node) for x in each) for each in held)


def _function_updates(node: fx.Node) -> Iterator[Place]:
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if target in _INPLACE_OPERATORS or target is operator.setitem:
        yield 0
    elif is_overload(target):
        for index, argument in written(target):
            yield index if index < len(node.args) else argument
    elif type(target).__module__ == "torch._dynamo.utils" and name.removeprefix("wrapped_") in _OF_ARRAYS:
        yield 0  # as Dynamo writes what is done with an array of numpy's
    elif name.endswith("_") and not name.endswith("__") and target not in _PYTHONS:
        yield 0 if node.args else next(iter(node.kwargs), 0)
    elif node.kwargs.get("out") is not None:
        yield "out"
    elif inspect.isfunction(target):
        yield from _python_function_updates(target, node)


def _python_function_updates(target: Callable[..., Any], node: fx.Node) -> Iterator[Place]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    given: dict[str, Place] = dict(zip(parameters, range(len(node.args)), strict=False))
    given |= {name: name for name in node.kwargs}
    if "inplace" in given and operand(node, given["inplace"]) is True:
        yield 0
    switch, names = STATISTICS.get(target, ("", ()))
    if not switch or not (operand(node, given[switch]) if switch in given else parameters[switch].default):
        return
    for name in names:
        if name in given and isinstance(operand(node, given[name]), fx.Node):
            yield given[name]


def out_of_place(
    operation: str, places: tuple[Place, ...], views: tuple[tuple[Any, ...], ...], *args: Any, **kwargs: Any
) -> Any:
    """Run an in-place operation on copies of the roots that it updates; give the new roots.

    operation: ``method:NAME`` or ``function:MODULE:NAME``. places: operands that are updated. views: for each place,
    the view operations that lead from the root (the operand given here) to the value that is updated.
    Gives the new root, or ``(result, root, ...)`` when the operation has a result of its own.

    An update under ``no_grad`` changes data and leaves the gradient: what comes back flows on to the old value.
    """
    positional, named, roots = list(args), dict(kwargs), []
    for place, chain in zip(places, views, strict=True):
        old = positional[place] if isinstance(place, int) else named[place]
        root = old.clone()
        roots.append((old, root))
        value = root
        for step, extra, extra_named in chain:
            value = _call(step, (value, *extra), extra_named)
        if isinstance(place, int):
            positional[place] = value
        else:
            named[place] = value
    if operation == "function:operator:setitem" and not isinstance(positional[2], torch.Tensor):
        positional[2] = value.new_full((), positional[2])
    result = _call(operation, tuple(positional), named)
    same = len(places) == 1 and (result is None or result is value)
    new = [_data_of(root, old) for old, root in roots]
    return new[0] if same else (result, *new)


def _data_of(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() or not old.requires_grad:
        return new
    with torch.enable_grad():
        return _Data.apply(old, new)  # type: ignore[no-any-return, no-untyped-call]


class _Data(torch.autograd.Function):
    """The data of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _call(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind, _, name = operation.partition(":")
    if kind == "method":
        return getattr(args[0], name)(*args[1:], **kwargs)
    return resolved(name)(*args, **kwargs)


def resolved(name: str) -> Callable[..., Any]:
    """What ``spell`` named: ``MODULE:PATH``. Raises ImportError or AttributeError where it is not there."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def spell(node: fx.Node) -> str | None:
    """The text by which ``out_of_place`` finds a node's operation again; None if it has no importable name."""
    if node.op == "call_method":
        return f"method:{node.target}"
    target: Any = node.target
    if target.__name__ == "_get_data_attr":
        return "method:detach"
    if is_overload(target):
        namespace, name = target.name().split(".")[0].split("::")
        return f"function:torch:ops.{namespace}.{name}.{overload_name(target)}"
    module = getattr(target, "__module__", None) or "torch"
    module = {"_operator": "operator", "torch._C._nn": "torch", "torch._C": "torch"}.get(module, module)
    path = getattr(target, "__qualname__", target.__name__)
    for candidate in (f"{module}:{path}", f"torch:{target.__name__}", f"torch._C:_nn.{target.__name__}"):
        try:
            if resolved(candidate) is target:
                return f"function:{candidate}"
        except (AttributeError, ImportError):
            continue
    return None


Extent = tuple[int, int]
"""An address, and that behind the last byte."""


def overlapping(extents: Sequence[Extent]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the extents that overlap, or are joined by others that do."""
    groups: list[list[int]] = []
    end = 0
    for start, stop, number in sorted((*extent, number) for number, extent in enumerate(extents)):
        if start >= end:
            groups.append([])
        groups[-1].append(number)
        end = max(end, stop)
    return tuple(tuple(sorted(group)) for group in groups if len(group) > 1)


def extent(value: torch.Tensor) -> Extent:
    """Where the elements of a tensor lie."""
    if value.layout != torch.strided or value.device.type == "meta" or not value.numel():
        return 0, 0
    return value.data_ptr(), value.data_ptr() + strided_nbytes(value.shape, value.stride(), value.dtype.itemsize)


def whole_extent(value: Any) -> Extent:
    """The memory that a tensor, or an array of numpy's, is part of."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type == "meta":
            return 0, 0
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    while isinstance(value.base, type(value)):
        value = value.base
    start = int(value.__array_interface__["data"][0])
    return start, start + int(value.nbytes)
