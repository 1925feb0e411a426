"""Custom functions that torch runs around a loop: right, and nothing of a step is held behind it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "reroll.compile": lambda model: reroll.compile(model, lowering="eager", schedule="standard"),
    "backend": lambda model: torch.compile(
        model, backend="reroll", options={"lowering": "eager", "schedule": "standard"}
    ),
}


class Spike(torch.autograd.Function):
    """A step, its operand and its result saved; the second result has no gradient."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, width: float) -> tuple[Tensor, Tensor]:
        spikes = (v > 0).to(v.dtype)
        ctx.save_for_backward(v, spikes)
        ctx.width, ctx.twice = width, v * 2
        ctx.mark_non_differentiable(over := v > 1)
        return spikes, over

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        v, spikes = ctx.saved_tensors
        return grads[0] / (1 + ctx.width * v.abs()).square() + 0.01 * spikes * ctx.twice, None


class Spiking(nn.Module):
    """A custom function before the loop, in its first step, which is another one, in the others, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.back = nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BH = Spike.apply(self.read(x_TBI[0]), 3.0)[0]  # type: ignore[no-untyped-call]
        for t in range(x_TBI.shape[0]):
            spikes, over = Spike.apply(v_BH - 0.1, 10.0)  # type: ignore[no-untyped-call]
            v_BH = 0.9 * v_BH + self.read(x_TBI[t]) + (self.back(spikes) if t else 0.0) - over.to(v_BH.dtype)
        out: Tensor = Spike.apply(v_BH, 5.0)[0] + v_BH  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_custom_functions_around_a_loop_are_right(door: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model, x_TBI = Spiking().double(), torch.randn(12, 3, 5, dtype=torch.float64, requires_grad=True)
    reroll.check(door(model), x_TBI, strict=True, measure=False)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_nothing_of_a_step_is_held_behind_it(door: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model = Spiking()
    run = door(model)

    def held() -> int:
        model.zero_grad()
        run(torch.randn(12, 3, 5)).sum().backward()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    for _ in range(3):
        held()
    gc.collect()
    gc.disable()
    try:
        first = held()
        assert [held() for _ in range(4)] == [first] * 4
    finally:
        gc.enable()


class Passing(nn.Module):
    """Two carries that pass through each step, but for what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x_TBI: Tensor, c_BI: Tensor, d_BI: Tensor) -> tuple[Tensor, Tensor]:
        h_BI = torch.zeros_like(c_BI)
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(self.layer(h_BI) + x_TBI[t])
            c_BI, d_BI = c_BI + h_BI, d_BI + h_BI
        return c_BI, c_BI + d_BI


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("schedule", ["store_all", "revolve"])
def test_the_gradient_of_a_carry_that_passes_through_is_not_the_incoming_one(schedule: str, lowering: str) -> None:
    """Autograd makes the first gradient of a leaf its own, and adds the next ones to it."""
    torch.manual_seed(0)
    model, x_TBI = Passing().double(), torch.randn(9, 2, 4, dtype=torch.float64)
    options: dict[str, Any] = {"schedule": schedule, "lowering": lowering, "segment": 2}
    found = []
    for run in (model, torch.compile(model, backend="reroll", options=options)):
        first = [torch.zeros(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        given = [torch.ones(2, 4, dtype=torch.float64) for _ in range(2)]
        model.zero_grad()
        for _ in range(3):
            torch.autograd.backward(run(x_TBI, *first), given)
        assert all(bool((each == 1).all()) for each in given)
        found.append([each.grad for each in (*first, *model.parameters())])
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
