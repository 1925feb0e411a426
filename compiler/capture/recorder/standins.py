"""Functions that stand in a recorded graph for what a model does in a way that a graph has no word for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def filled(size: Any, fill_value: Tensor, **options: Any) -> Tensor:
    """``torch.full`` with a value that is a tensor, which Python does not read."""
    kind: type = bool if fill_value.dtype == torch.bool else float if fill_value.is_floating_point() else int
    return torch.full(size, kind(), **options).copy_(fill_value.detach())


def fresh_leaf(value: Tensor) -> Tensor:
    """The value as a leaf of autograd's that needs a gradient, in the same memory."""
    return value.detach().requires_grad_()


def application(function: Any, objects: Mapping[int, Any]) -> Callable[..., Any]:
    """A function that applies an ``autograd.Function``, with these objects among its operands, by place."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        count = len(args) + len(objects)
        return function.apply(*(objects[n] if n in objects else next(rest) for n in range(count)), **kwargs)

    apply.__name__ = apply.__qualname__ = f"{function.__name__}_apply"
    return apply
