"""The networks of ``tests/networks`` made so large that memory and time say something: batch and widths times a factor.

Every layer that is made inside of ``wider`` is so many times as wide in and out; the networks themselves are those of
the tests. A width is a number of features, neurons or channels.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._pytree import tree_map

_WIDTHS = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv2d: ("in_channels", "out_channels"),
    nn.BatchNorm1d: ("num_features",),
    nn.BatchNorm2d: ("num_features",),
    nn.LayerNorm: ("normalized_shape",),
    nn.RNNCellBase: ("input_size", "hidden_size"),
    nn.RNNBase: ("input_size", "hidden_size", "proj_size"),
}
_SNNTORCH = {
    "RLeaky": ("linear_features",),
    "SLSTM": ("input_size", "hidden_size"),
    "SConv2dLSTM": ("in_channels", "out_channels"),
}


@contextmanager
def wider(factor: int) -> Iterator[None]:
    """Make layers ``factor`` times as wide."""
    snntorch = importlib.import_module("snntorch")
    layers = {**_WIDTHS, **{getattr(snntorch, name): widths for name, widths in _SNNTORCH.items()}}
    inside: list[bool] = []  # a layer makes the layers that it consists of from its own widths
    with ExitStack() as stack:
        for layer, widths in layers.items():
            stack.enter_context(mock.patch.object(layer, "__init__", _widened(layer.__init__, widths, factor, inside)))
        yield


def _widened(init: Any, widths: tuple[str, ...], factor: int, inside: list[bool]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def widened(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if not inside:
            for name in set(widths) & set(bound.arguments):
                bound.arguments[name] *= factor
        inside.append(True)
        try:
            init(*bound.args, **bound.kwargs)
        finally:
            inside.pop()

    return widened


def enlarged(inputs: Any, steps: int, time: int, batch: int, width: int) -> Any:
    """The inputs of a case, (T, B, F, ...) or with time and batch exchanged, or a state (..., B, F), repeated.

    What has one row for the whole batch is left as it is.
    """

    def larger(value: Tensor) -> Tensor:
        sequence = value.ndim > 2 and value.shape[time] == steps
        features = 2 if sequence else value.ndim - 1
        rows = 1 - time if sequence else features - 1
        if rows < 0 or value.shape[rows] == 1:
            return value
        times = [1] * value.ndim
        times[rows], times[features] = batch, width
        return value.repeat(times)

    return tree_map(larger, inputs)
