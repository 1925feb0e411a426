"""Two loops in one graph share a budget by what a byte is worth in each, and the least that is named is the least."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.construct import budget_allocation
from reroll.errors import BudgetError
from reroll.report.report import Report
from walks import Shared

pytestmark = pytest.mark.usefixtures("shared_walks")

EAGER: dict[str, Any] = {"lowering": "eager"}
ROOM = (0.3, 0.6)  # of what plain BPTT holds


class Two(nn.Module):
    """A wide loop that computes little, then a narrow one that computes much for each byte that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.RNNCell(6, 48), nn.GRUCell(6, 8)

    def forward(self, x_TBI: Tensor, u_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH, g_BH = x_TBI.new_zeros(x_TBI.shape[1], 48), x_TBI.new_zeros(x_TBI.shape[1], 8)
        for x_BI in x_TBI.unbind(0):
            h_BH = self.wide(x_BI, h_BH)
        for u_BI in u_TBI.unbind(0):
            g_BH = self.narrow(u_BI, g_BH)
        return h_BH, g_BH


INPUTS = torch.randn(24, 16, 6), torch.randn(17, 16, 6)


MODEL = Two()


def compiled(model: nn.Module, door: str, **options: Any) -> Any:
    if door == "backend":
        return Shared(model, {**EAGER, **options}, fullgraph=False)
    return reroll.compile(model, **EAGER, **options)


def report(**options: Any) -> Report:
    return reroll.explain(compiled(MODEL, "backend", **options), *INPUTS)


@pytest.fixture(scope="module")
def plain() -> int:
    return report(schedule="store_all").predicted_peak


def work(found: Report) -> float:
    """Steps that are run again, of both loops, by what one takes."""
    return sum(loop.tally.reforward_steps * weight for loop, weight in zip(found.loops, (1.0, 1.5), strict=True))


def test_a_budget_is_kept_and_used(plain: int) -> None:
    found = [report(memory_budget=int(room * plain)) for room in ROOM]
    peaks = [each.predicted_peak / plain for each in found]
    assert all(0.85 * room <= peak <= room for room, peak in zip(ROOM, peaks, strict=True))
    again = [work(each) for each in found]
    assert again == sorted(again, reverse=True), "more bytes are never slower"
    budgets = [loop.budget for loop in found[1].loops]
    assert all(budget is not None for budget in budgets)
    assert [loop.prediction.peak <= budget for loop, budget in zip(found[1].loops, budgets, strict=True)] == [True] * 2  # type: ignore[operator]


def test_the_least_that_is_named_works_and_one_byte_less_is_refused() -> None:
    with pytest.raises(
        BudgetError, match=r"the least that the 2 loops of this network need together: [0-9,]+ bytes"
    ) as found:
        report(memory_budget=1, segment=2)
    least = found.value.nbytes
    assert report(memory_budget=least, segment=2).predicted_peak == least
    with pytest.raises(BudgetError) as found:
        report(memory_budget=least - 1, segment=2)
    assert found.value.nbytes == least


def test_a_share_of_plain_memory(plain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll.backends.dynamo.plain.plain_peak", lambda *_: plain)
    assert report(memory_budget=0.4).predicted_peak <= 0.4 * plain
    assert report(memory_budget=1.0).predicted_peak == plain


def test_loops_that_fit_as_they_are_are_planned_once(plain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_allocation, "_ladder", None)
    assert report(memory_budget=2 * plain).predicted_peak <= plain


@pytest.mark.parametrize("door", ["backend", "compile"])
def test_gradients_under_a_shared_budget(door: str, plain: int) -> None:
    model = Two().double()
    fast = compiled(model, door, memory_budget=int(plain))
    inputs = torch.randn(24, 16, 6, dtype=torch.float64), torch.randn(24, 16, 6, dtype=torch.float64)
    assert reroll.check(fast, *inputs, measure=False).equal
