"""Bytes of a training step on a card, as its allocator counts them, beside those that ``explain`` predicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

T, B, I, H = 256, 64, 64, 256  # noqa: E741
MIB = 1 << 20
PLANS: dict[str, dict[str, Any]] = {
    "store_all": {"schedule": "store_all"},
    "standard": {"schedule": "standard"},
    "double": {"schedule": "double", "remote": "host"},
}
RECORDED = pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("error::reroll.RerollWarning"),
]


class Reader(nn.Module):
    """An LSTM, of which the last state is read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(I, H), nn.Linear(H, 10)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = c_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH, c_BH = self.cell(x_TBI[t], (h_BH, c_BH))
        logits: Tensor = self.out(h_BH)
        return logits


def peak_of(run: Callable[[Tensor], Tensor], model: nn.Module, x_TBI: Tensor) -> int:
    """The peak of a step after two that warm up, without the gradients of parameters that it makes."""

    def step() -> None:
        run(x_TBI).square().mean().backward()

    step()
    step()
    model.zero_grad(set_to_none=True)
    found = reroll.measure(step, [model]).local_peak
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture
def reader(real_card: torch.device) -> tuple[nn.Module, Tensor]:
    return Reader().to(real_card), torch.randn(T, B, I, device=real_card)


@pytest.mark.parametrize("plan", PLANS)
def test_the_predicted_peak_is_the_measured_one(plan: str, reader: tuple[nn.Module, Tensor]) -> None:
    model, x_TBI = reader
    run = reroll.compile(model, cuda_graphs=False, **PLANS[plan])
    measured, predicted = peak_of(run, model, x_TBI), reroll.explain(run, x_TBI).predicted_peak
    assert abs(measured - predicted) <= 0.1 * predicted + MIB, f"measured {measured:,}, predicted {predicted:,}"


@pytest.mark.parametrize("plan", PLANS)
def test_the_predicted_peak_with_recordings_is_no_less(plan: str, reader: tuple[nn.Module, Tensor]) -> None:
    """What recordings hold is there before the step, and is counted by the prediction."""
    model, x_TBI = reader
    run = reroll.compile(model, **PLANS[plan])
    measured, predicted = peak_of(run, model, x_TBI), reroll.explain(run, x_TBI).predicted_peak
    assert measured <= 1.1 * predicted + MIB, f"measured {measured:,}, predicted {predicted:,}"


@RECORDED
def test_standard_takes_a_third_of_eager(recorded: bool, reader: tuple[nn.Module, Tensor]) -> None:
    model, x_TBI = reader
    eager = peak_of(model, model, x_TBI)
    run = reroll.compile(model, cuda_graphs=recorded, schedule="standard")
    found = peak_of(run, model, x_TBI)
    assert found <= 0.35 * eager, f"{found:,} of {eager:,}"


@RECORDED
@pytest.mark.parametrize("part", [0.15, 0.5])
def test_a_budget_in_bytes_is_held(part: float, recorded: bool, reader: tuple[nn.Module, Tensor]) -> None:
    """Torch's allocator rounds each tensor up to 512 bytes, of which a budget does not know."""
    model, x_TBI = reader
    budget = int(part * peak_of(model, model, x_TBI))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reroll.RerollWarning)  # a budget may leave no room for recordings
        run = reroll.compile(model, memory_budget=budget, cuda_graphs=recorded)
        found = peak_of(run, model, x_TBI)
    assert reroll.explain(run, x_TBI).predicted_peak <= budget
    assert found <= budget + MIB, f"{found:,}, and the budget was {budget:,}"
