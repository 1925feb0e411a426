"""Private torch API that the capture needs, tried on 2.11 and 2.13, under plain names.

``torch._C._set_grad_enabled`` is the node by which Dynamo writes ``no_grad`` and ``enable_grad``; ``OpOverload`` is the
type of ``torch.ops`` functions, whose schemas say what they update. Through ``_SingleLevelFunction`` every
``autograd.Function`` is applied; ``_is_any_autocast_enabled`` asks once for all devices. ``_LazyGraphModule`` writes
the Python code of a graph when it is called first: passes edit graphs that never are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate as map_aggregate

LazyGraphModule = _LazyGraphModule
set_grad_enabled = torch._C._set_grad_enabled
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def is_overload(target: Any) -> bool:
    """Whether a call's target is an operator of ``torch.ops`` with a schema."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: Any) -> bool:
    """Whether a call's target is an operator that runs a function of the user's."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def written(target: Any) -> Iterator[tuple[int, str]]:
    """(position, name) of the arguments that an operator of ``torch.ops`` updates, by its schema."""
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield index, argument.name


@functools.cache
def tagged_random(name: str) -> bool:
    """Whether an ATen operator of this name is tagged as drawing from the random number generator."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads()
    )


def hint(value: Any) -> Any:
    """The number that a symbolic one stands for in this call, without a guard; None if it depends on data."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def storage_id(value: torch.Tensor) -> int:
    """Identity of the memory behind a tensor."""
    return int(value.untyped_storage()._cdata)


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """The dtype of autocast on each kind of device, None where it is off."""
    kinds = ("cpu", "cuda")
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds)


@contextmanager
def applied_functions(
    handler: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Every ``autograd.Function`` is applied by ``handler(function, inner, args, kwargs)``; ``inner`` applies it."""

    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        inner = super(_SingleLevelFunction, cls).apply
        return handler(cls, inner, args, kwargs) if threading.get_ident() == thread else inner(*args, **kwargs)

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
