"""What a model holds is looked at at every call: without copies, and put back only where a look changed it."""

from __future__ import annotations

import sys
import tracemalloc
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.keys import key_of
from reroll.backends.front.state import State


class Holder(nn.Module):
    """Holds a data set, as training scripts do."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.samples = np.zeros((samples, 1000), dtype=np.float64)
        self.names, self.index, self.seen = ["a"] * samples, {"first": 0}, deque([1, 2])

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(x[t]) + h)
        return h


def key(model: nn.Module) -> Any:
    state = State.of(model, (), {}, parameters=False, values=False)
    return key_of(state, (model, (), {}))


def test_a_data_set_is_not_copied_by_a_call() -> None:
    model = Holder(2000)  # 16 MB
    compiled, x = reroll.compile(model, time_dim=0, lowering="eager"), torch.randn(20, 3, 4)
    compiled(x).sum().backward()
    tracemalloc.start()
    compiled(x).sum().backward()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < model.samples.nbytes / 4
    assert sys.getsizeof(key(model)[2][2][0][-1]) < 100_000


def test_changes_of_what_is_held_are_seen() -> None:
    model = Holder(2000)
    before = key(model)
    assert key(model) == before
    model.samples[...] = 1
    changed = key(model)
    assert changed != before
    model.samples = model.samples.copy()
    assert key(model) != changed
    model.samples = np.zeros((4, 1000))
    small = key(model)
    model.samples[3, 999] = 1
    assert key(model) != small


class Guarded(list[Any]):
    """A list that nobody may write to."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("written")


def test_only_what_changed_is_put_back() -> None:
    model = Holder(3)
    model.names = Guarded(["a", "b"])
    model.samples.flags.writeable = False
    state = State.of(model, parameters=False)
    model.index["second"], model.calls = 1, 3  # type: ignore[assignment]
    model.seen.append(3)
    state.restore()
    assert model.index == {"first": 0}
    assert model.seen == deque([1, 2])
    assert not hasattr(model, "calls")
    model.samples.flags.writeable = True
    state = State.of(model, parameters=False)
    model.samples[1, 1] = 5
    state.restore()
    assert not model.samples.any()
