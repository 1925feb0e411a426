"""A program is compared with the model once more at its 2nd, 4th, 8th call, whatever the key of a call does not see."""

from __future__ import annotations

import cProfile
import functools
import gc
import pstats
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
from recorded_networks import recordings
from reroll.backends.front.full.digest import Digest
from reroll.backends.front.python_state.state_cache import Reach
from reroll.backends.front.recorded import Recorded
from reroll.errors import ProofError, RerollWarning

H = 4
GAIN = {"of a global": 0.5}


class Read(nn.Module):
    """Its steps read something of each kind of state that a key tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(H, H).double()
        self.gain = 0.5

    def forward(self, x_TBH: Tensor, scale: float = 1.0) -> Tensor:
        h_BH = torch.zeros_like(x_TBH[0])
        for x_BH in x_TBH:
            h_BH = torch.tanh(self.cell(h_BH) * self.gain + scale * x_BH * GAIN["of a global"])
            if self.training:
                h_BH = h_BH * 0.9
        return h_BH


def by_attribute(model: Read) -> None:
    model.gain = 0.25


def by_mode(model: Read) -> None:
    model.eval()


def by_global(model: Read) -> None:
    GAIN["of a global"] = 0.75


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    GAIN["of a global"] = 0.5


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is the same at every call of a length."""
    noted, first = Reach.noted, dict[Any, Any]()

    def same(self: Reach, model: Any, args: Any, kwargs: Any) -> Any:
        state, key = noted(self, model, args, kwargs)
        return state, first.setdefault((id(self), len(args[0])), key)

    monkeypatch.setattr(Reach, "noted", same)


def data(steps: int = 12) -> Tensor:
    return torch.randn(steps, 2, H, dtype=torch.float64)


def compiled(model: nn.Module) -> nn.Module:
    return reroll.compile(model, lowering="eager")


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("change", [by_attribute, by_mode, by_global])
@pytest.mark.parametrize(("calls", "found"), [(1, 2), (2, 4), (5, 8)])
def test_what_a_key_misses_is_found_at_the_next_power_of_two(change: Any, calls: int, found: int) -> None:
    model = Read()
    run = compiled(model)
    for _ in range(calls):
        x = data()
        torch.testing.assert_close(run(x), model(x))
    change(model)
    for _ in range(calls + 1, found):
        run(data())  # of the model as it was
    with pytest.raises(ProofError, match=r"does something else than when.*test_looked_again\.py"):
        run(data())
    x = data()
    torch.testing.assert_close(run(x), model(x))  # looked at anew


def test_nothing_is_found_where_all_is_as_it_was() -> None:
    model = Read()
    run = compiled(model)
    with mock.patch.object(Digest, "departure", autospec=True, side_effect=Digest.departure) as looks:
        for call in range(1, 10):
            x = data(12 + call % 2)
            torch.testing.assert_close(run(x), model(x))
    assert looks.call_count == 4  # the 2nd and the 4th of either length


def test_a_table_that_nobody_sees_is_dynamos() -> None:
    """It is made at the first call, and kept in a cache."""
    made = functools.lru_cache(lambda: torch.linspace(0, 1, H, dtype=torch.float64).exp())

    class Tabled(Read):
        def forward(self, x_TBH: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x_TBH * made(), scale)

    model = Tabled()
    run: Any = compiled(model)
    for _ in range(4):
        x = data()
        torch.testing.assert_close(run(x), model(x))
    assert run.reroll_caller.is_read
    assert [loop.recurrence.steps for loop in reroll.explain(run, x).loops] == [12]


@pytest.mark.usefixtures("blind")
def test_a_warning_says_what_could_not_be_compared() -> None:
    model = Read()
    run = compiled(model)
    run(data())
    by_attribute(model)
    holds = "reroll.backends.front.beside.holds_history"
    with mock.patch(holds, return_value=True), pytest.warns(RerollWarning, match="does something else.*not seen, as"):
        run(data())


def test_a_profiler_goes_on() -> None:
    model, profile, x = Read(), cProfile.Profile(), data()
    with profile:
        compiled(model)(x)
        model(x)
    assert any(name == "forward" and "linear.py" in file for file, _, name in pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    seen = list[Any]()
    sys.setprofile(lambda *event: seen.append(event))
    try:
        compiled(Read())(x)
        del seen[:]
        model(x)
    finally:
        sys.setprofile(None)
    assert seen


COLLECTED = [0.0]


def test_what_is_called_when_python_collects_is_nothing_of_the_models() -> None:
    class Collecting(Read):
        def forward(self, x_TBH: Tensor, scale: float = 1.0) -> Tensor:
            gc.collect()
            return super().forward(x_TBH, scale)

    def counted(phase: str, _: object) -> None:
        COLLECTED[0] += 1.5

    run = compiled(Collecting())
    gc.callbacks.append(counted)
    try:
        for _ in range(3):
            run(data())
            gc.collect()
        assert counted in gc.callbacks
    finally:
        gc.callbacks.remove(counted)
    assert recordings(run) == 1
    assert COLLECTED[0] > 0


def test_a_look_for_which_there_is_no_memory_is_left_out() -> None:
    model = Read()
    run = compiled(model)
    run(data())
    with mock.patch.object(Recorded, "record", side_effect=MemoryError) as looks:
        for _ in range(3):
            x = data()
            torch.testing.assert_close(run(x), model(x))
    assert looks.call_count == 2  # the 2nd and the 4th
