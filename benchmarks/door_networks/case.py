"""What ``doors.py`` needs of a network: how it is called, and what of it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Network:
    """A training program as its users write it.

    run: what is compiled: a module, or a function of the user's that calls one
    parts: the modules that are trained
    inputs: the operands of a call
    reset: what users call before each batch
    """

    run: Callable[..., Any]
    parts: tuple[nn.Module, ...]
    inputs: tuple[Any, ...]
    reset: Callable[[], object] = lambda: None


Make = Callable[[], Network]


def over_time(model: nn.Module, *inputs: Any, reset: Callable[[], object] | None = None) -> Network:
    """A module that is called with a sequence."""
    return Network(model, (model,), inputs, reset or (lambda: None))
