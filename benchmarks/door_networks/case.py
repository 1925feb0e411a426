"""What ``doors.py`` needs of a network: how it is called, what of it is trained, and how its loop is named."""

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
    how: the options of ``reroll.compile`` that name the loop
    reset: what users call before each batch
    """

    run: Callable[..., Any]
    parts: tuple[nn.Module, ...]
    inputs: tuple[Any, ...]
    how: dict[str, Any]
    reset: Callable[[], object] = lambda: None


Make = Callable[[], Network]


def over_time(model: nn.Module, *inputs: Any, time_dim: Any = 0, reset: Callable[[], object] | None = None) -> Network:
    """A module that is called with a sequence."""
    return Network(model, (model,), inputs, {"time_dim": time_dim}, reset or (lambda: None))
