"""Sequences whose first dimension is the batch: rows of a segment are copied, and no tape keeps the copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

STEPS, INPUTS = 96, 8
PLANS: dict[str, dict[str, Any]] = {
    "store_all": {"schedule": "store_all"},
    "standard": {"schedule": "standard"},
    "double": {"schedule": "double", "remote": "local"},
    "a third": {"memory_budget": 0.33},
}


class Projected(nn.Module):
    """A layer before the loop, whose rows each step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)

    def forward(self, x_BTI: Tensor) -> Tensor:
        y_BTI = self.before(x_BTI)
        h_BI = x_BTI.new_zeros(x_BTI.shape[0], INPUTS)
        for t in range(x_BTI.shape[1]):
            h_BI = torch.tanh(self.inner(h_BI) * y_BTI[:, t].sigmoid() + y_BTI[:, t])
        return h_BI


class Cell(nn.Module):
    """A cell that saves its input as it is, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(INPUTS, 4), nn.Linear(4, 1)

    def forward(self, x_BTI: Tensor) -> Tensor:
        h_BH = x_BTI.new_zeros(x_BTI.shape[0], 4)
        for t in range(x_BTI.shape[1]):
            h_BH = self.cell(x_BTI[:, t], h_BH) * x_BTI[:, t, :1]
        return self.out(h_BH)  # type: ignore[no-any-return]


class Backwards(nn.Module):
    """The last step first, and every step beside a product of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, INPUTS)

    def forward(self, x_BTI: Tensor) -> Tensor:
        h_BI = x_BTI.new_zeros(x_BTI.shape[0], INPUTS)
        for t in reversed(range(x_BTI.shape[1])):
            h_BI = torch.tanh(self.inner(h_BI * x_BTI[:, t])) * x_BTI[:, t].cos()
        return h_BI


MODELS: dict[str, Callable[[], nn.Module]] = {"projected": Projected, "cell": Cell, "backwards": Backwards}


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x_BTI: Tensor) -> list[Tensor]:
    x_BTI = x_BTI.clone().requires_grad_()
    return list(torch.autograd.grad(run(x_BTI).square().sum(), [x_BTI, *model.parameters()]))


def measured_peak(fast: nn.Module, model: nn.Module, x_BTI: Tensor) -> int:
    """The local peak of a training step that compiles nothing."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        fast(x_BTI).sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    return reroll.measure(step, exclude=[model]).local_peak


@pytest.mark.variants(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_gradients_and_peaks(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x_BTI = MODELS[name]().double(), torch.randn(4, STEPS, INPUTS, dtype=torch.float64)
    fast = reroll.compile(model, lowering="eager", **options)
    for steps in (STEPS, STEPS - 7):
        given = x_BTI[:, :steps].contiguous()
        for found, expected in zip(gradients(fast, model, given), gradients(model, model, given), strict=True):
            torch.testing.assert_close(found, expected)

    predicted, measured = reroll.explain(fast, x_BTI).predicted_peak, measured_peak(fast, model, x_BTI)
    assert 0.9 * predicted <= measured <= 1.01 * predicted


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.usefixtures("unproved")  # some calls would look at the model again
def test_a_budget_is_kept_by_inductor() -> None:
    torch.manual_seed(0)
    model, x_BTI = Projected(), torch.randn(4, STEPS, INPUTS)
    fast = reroll.compile(model, memory_budget="12KiB", segment=4)
    for found, expected in zip(gradients(fast, model, x_BTI), gradients(model, model, x_BTI), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    assert measured_peak(fast, model, x_BTI) <= 12 << 10


def test_a_graph_is_reversed_twice() -> None:
    torch.manual_seed(0)
    model, x_BTI = Cell().double(), torch.randn(4, STEPS, INPUTS, dtype=torch.float64)
    fast = reroll.compile(model, lowering="eager", schedule="store_all")
    loss = fast(x_BTI).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(model(x_BTI).square().sum(), list(model.parameters()))
    for found in (first, again):
        for own, eagers in zip(found, expected, strict=True):
            torch.testing.assert_close(own, eagers)


def test_a_sequence_that_changed_before_the_backward_is_refused() -> None:
    """The tape has a view of it, so its change is seen as eager's is."""
    torch.manual_seed(0)
    model, x_BTI = Cell(), torch.randn(4, STEPS, INPUTS)
    for run in (model, reroll.compile(model, lowering="eager", schedule="store_all")):
        loss = run(x_BTI).sum()
        x_BTI.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
