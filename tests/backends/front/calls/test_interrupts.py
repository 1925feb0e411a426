"""An interrupt (Ctrl-C) in a call that looks at a model leaves all as it was before the call.

Shape letters: T steps, B batch, N neurons.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.calls.interrupts import interrupted_once
from reroll.backends.front.python_state.state import State

T, B, N = 9, 2, 3


class Counting(nn.Module):
    """A recurrence with state of every sort, which is interrupted in its forward if asked to be."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(N, N)
        self.register_buffer("calls", torch.zeros(()))
        self.last, self.seen, self.interrupted = torch.zeros(()), {"steps": torch.zeros(())}, False

    def forward(self, x_TBN: Tensor) -> Tensor:
        self.calls += 1
        self.seen["steps"] += x_TBN.shape[0]
        h_BN = torch.zeros_like(x_TBN[0])
        for x_BN in x_TBN:
            h_BN = self.cell(nn.functional.dropout(x_BN, 0.1), h_BN)
        if self.interrupted:
            signal.raise_signal(signal.SIGINT)
        self.last = h_BN
        return h_BN


@pytest.fixture(autouse=True)
def by_python() -> Iterator[None]:
    """Interrupts are taken as Python does by itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_is_put_back_is_put_back_whole(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt comes as the state is put back: the only one, or a second one behind one in the forward."""
    restore, model, x_TBN = State.restore, Counting(), torch.randn(T, B, N)

    def blown(state: State) -> None:
        signal.raise_signal(signal.SIGINT)
        restore(state)

    monkeypatch.setattr(State, "restore", blown)
    model.interrupted, last, numbers = interrupted, model.last, torch.get_rng_state()
    run = reroll.compile(model, lowering="eager")
    with pytest.raises(KeyboardInterrupt):
        run(x_TBN)
    assert (float(model.calls), float(model.seen["steps"]), model.last is last) == (0, 0, True)
    assert torch.equal(torch.get_rng_state(), numbers)
    monkeypatch.undo()
    model.interrupted = False
    run(x_TBN)
    assert float(model.calls) == 1


def test_others_take_interrupts_as_before() -> None:
    """A handler of the user's stays, and another thread sets none."""
    taken, seen = list[int](), list[bool]()
    signal.signal(signal.SIGINT, lambda number, _: taken.append(number))
    with interrupted_once():
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def within() -> None:
        with interrupted_once():
            seen.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert (taken, seen) == ([signal.SIGINT], [True])
