"""How an operation that a ``TorchFunctionMode`` sees is written in a graph of Dynamo's."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reroll.graph.private import set_grad_enabled

_PROPERTIES = (
    *(
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "ndim",
        "layout",
        "is_cuda",
        "is_cpu",
        "is_mps",
        "is_meta",
    ),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes"),
)
_METHODS = (
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous", "nelement", "ndimension"),
    *("element_size", "get_device", "is_signed", "is_same_size", "is_inference", "__len__"),
)
_FUNCTIONS = ("is_floating_point", "is_complex", "numel", "result_type", "can_cast", "promote_types", "is_inference")
METADATA = frozenset(
    {getattr(Tensor, name).__get__ for name in _PROPERTIES}
    | {getattr(Tensor, name) for name in _METHODS}
    | {getattr(torch, name) for name in _FUNCTIONS}
)
"""What gives no tensor, and nothing that depends on values."""
_PARTS = ("T", "mT", "H", "mH", "real", "imag")
_BINARY = {name: getattr(operator, name) for name in ("add", "sub", "mul", "pow", "lt", "le", "gt", "ge", "eq", "ne")}
_BINARY |= {"div": operator.truediv, "true_divide": operator.truediv, "matmul": operator.matmul}
_REFLECTED = {f"__r{name}__": getattr(operator, name) for name in ("sub", "pow", "mod", "matmul", "lshift", "rshift")}
_REFLECTED |= {"__rdiv__": operator.truediv, "__rtruediv__": operator.truediv, "__rfloordiv__": operator.floordiv}
_WRAPPED = (Tensor.__pow__, Tensor.__ipow__)  # functions of Python's, named like the methods that they call
_OWNERS = (torch, torch.nn.functional)


@dataclass(frozen=True, slots=True, eq=False)
class Spelled:
    """One call, as a node has it."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """The result of a call of a function."""
        return self.target(*self.args, **self.kwargs)


def spelled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelled | None:
    """The call as Dynamo writes it: Python's operators, names of methods, functions. None for what it has no word for.

    The target of a function is the same object at each call, so that calls can be compared.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        part = func.__self__.__name__
        if part == "data":
            return Spelled("call_method", "detach", args[:1], {})
        return Spelled("call_function", getattr, (args[0], part), {}) if part in _PARTS else None
    if getattr(Tensor, name, None) == func or func in _WRAPPED:
        return _method(name, args, kwargs)
    if not callable(func) or name.startswith("__"):
        return None
    known = (getattr(owner, name) for owner in _OWNERS if getattr(owner, name, None) == func)
    target = set_grad_enabled if func == set_grad_enabled else next(known, func)
    return Spelled("call_function", target, args, kwargs)


def _method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelled | None:
    if name in _BINARY and len(args) == 2 and not kwargs:
        return Spelled("call_function", _BINARY[name], args, {})
    if name in _REFLECTED:
        return Spelled("call_function", _REFLECTED[name], (args[1], args[0]), {})
    if not name.startswith("__"):
        return Spelled("call_method", name, args, kwargs)
    same = getattr(operator, name, None)
    return None if same is None or kwargs else Spelled("call_function", same, args, {})
