"""What the tests of nn.RNN, nn.GRU and nn.LSTM share.

T time, B batch, I inputs, H hidden values, P projected ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import compare, sizes

T, B, I, H, P = 9, 3, 5, 7, 4  # noqa: E741
DOUBLE: dict[str, Any] = {"schedule": "double", "chunk": 4, "slots": 2, "segment": 2, "remote": "disk", "verify": True}


def needs_final_states_of_lstm() -> None:
    if torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 and 2.12 gives the last states of nn.LSTM wrong shapes")


class Model(nn.Module):
    """Parts that the networks share, around one of them."""

    def __init__(self, network: Callable[..., Any], rnn: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network
        self.l, self.r = nn.Linear(I, H), nn.Linear(H, H)
        self.rnn = rnn or nn.RNN(I, H, 2)

    def forward(self, *inputs: Any) -> Any:
        return self.network(self, *inputs)


def check(model: nn.Module, *inputs: Any, **options: Any) -> tuple[tuple[int, int], ...]:
    """Compare with plain eager autograd; give the recurrences as (steps, carries)."""
    different, made = compare(model, inputs, **{"schedule": "standard", **options})
    assert not different
    return sizes(made)


def sequence(steps: int = T) -> Tensor:
    return torch.randn(steps, B, I)


def state(rows: int, size: int = H) -> Tensor:
    return torch.randn(rows, B, size)


def whole(s: Model, x: Tensor, *states: Tensor) -> Any:
    return s.rnn(x, *((states,) if len(states) > 1 else states))


class Bodied(nn.Module):
    """A recurrent cell, and what a body does with it."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.cell, self.body = nn.RNNCell(3, 4), body

    def forward(self, x: Tensor) -> Any:
        """What the body gives."""
        return self.body(self, x)

    def states(self, x: Tensor, change: Callable[[int, Tensor], Tensor] = lambda _, h: h) -> list[Tensor]:
        """The states of all steps, each changed by its number."""
        h, found = x.new_zeros(x.shape[1], 4), []
        for t in range(x.shape[0]):
            h = change(t, self.cell(x[t], h))
            found.append(h)
        return found
