"""Peaks on cards are read from the allocator's history, in which gradients behind the peak are not taken off it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reroll.backends.measure import measure as room

GRADIENT = 700


class Allocator:
    """What torch tells of an allocator: every block, by its address, when it is taken and when it is given back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.trace: list[dict[str, Any]] = []
        self.recorded: list[Any] = []
        patch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: self.recorded.append(enabled))
        patch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [self.trace]})

    def take(self, address: int, nbytes: int) -> None:
        self.trace.append({"action": "alloc", "addr": address, "size": nbytes})

    def give_back(self, address: int, nbytes: int) -> None:
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": address, "size": nbytes})


class OnCard:
    """A gradient on a card: what is read of it."""

    is_cuda = True

    def untyped_storage(self) -> "OnCard":
        return self

    def data_ptr(self) -> int:
        return GRADIENT


@pytest.mark.parametrize("behind", [True, False])
def test_a_gradient_is_left_out_where_it_is(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)

    def step() -> None:
        if not behind:
            allocator.take(GRADIENT, 300)
        allocator.take(1, 1_000)
        allocator.give_back(1, 1_000)
        if behind:
            allocator.take(GRADIENT, 300)

    def made(_: Any) -> list[Tensor]:
        return [OnCard()]  # type: ignore[list-item]

    assert room._cuda_peak(step, made) == 1_000
    assert allocator.recorded == ["all", None]


def test_a_call_that_fails_ends_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)

    def fails() -> None:
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        room._cuda_peak(fails, lambda _: [])
    assert allocator.recorded == ["all", None]
