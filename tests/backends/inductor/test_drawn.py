"""Numbers that a model draws from Python's ``random`` reach its graph as they are, as often as in eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.errors import UnsupportedError

LOWERINGS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


class Gain(nn.Module):
    """A GRU that reads its sequence with one gain for all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, gain = x.new_zeros(x.shape[1], 6), random.uniform(0.5, 2.0)
        for t in range(x.shape[0]):
            h = self.cell(x[t] * gain, h)
        return h * gain


class Noisy(Gain):
    """Another gain at every step."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 6)
        for t in range(x.shape[0]):
            h = self.cell(x[t] * random.uniform(0.5, 2.0), h)
        return h


def front(model: nn.Module, lowering: str) -> Any:
    return reroll.compile(model, lowering=cast("Any", lowering))


def backend(model: nn.Module, lowering: str) -> Any:
    return torch.compile(model, backend="reroll", options={"lowering": lowering})


def trained(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, the gradients, and the number that Python draws next."""
    random.seed(3)
    model.zero_grad()
    made = run(x)
    made.square().sum().backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return [made.detach(), *gradients, torch.tensor(random.random())]


def agrees(run: Any, model: nn.Module, x: Tensor) -> None:
    for found, expected in zip(trained(run, model, x), trained(model, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("door", [front, backend])
def test_a_number_of_python_is_that_of_eager(door: Callable[[nn.Module, str], Any], lowering: str) -> None:
    """Dynamo says float32 of what it hands over as float64, and inductor reads the memory as it was told."""
    model = Gain()
    run = door(model, lowering)
    for steps in (12, 12, 9):
        agrees(run, model, torch.randn(steps, 3, 4))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("door", [front, backend])
def test_a_number_at_every_step(door: Callable[[nn.Module, str], Any], lowering: str) -> None:
    model = Noisy()
    agrees(door(model, lowering), model, torch.randn(7, 3, 4))


@pytest.mark.inductor
def test_a_number_without_a_loop() -> None:
    model = nn.Linear(4, 4)
    run = torch.compile(lambda x: model(x) * random.uniform(0.5, 2.0), backend="reroll")
    random.seed(3)
    with pytest.warns(reroll.RerollWarning, match="no recurrence"):
        found = run(torch.ones(2, 4))
    random.seed(3)
    torch.testing.assert_close(found, model(torch.ones(2, 4)) * random.uniform(0.5, 2.0))


@pytest.mark.parametrize("door", [front, backend])
def test_values_of_float64_are_refused_unless_that_is_the_default(door: Callable[[nn.Module, str], Any]) -> None:
    model, x = Gain().double(), torch.randn(9, 3, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"Python's random.*set_default_dtype"):
        door(model, "eager")(x)
    try:
        torch.set_default_dtype(torch.float64)
        agrees(door(model, "eager"), model, x)
        torch.set_default_dtype(torch.bfloat16)
        with pytest.raises(UnsupportedError, match=r"bfloat16, too short"):
            door(model.bfloat16(), "eager")(x.bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("door", [front, backend])
def test_a_refused_call_draws_nothing(door: Callable[[nn.Module, str], Any]) -> None:
    random.seed(3)
    with pytest.raises(UnsupportedError):
        door(Gain().double(), "eager")(torch.randn(12, 3, 4, dtype=torch.float64))
    after = random.random()
    random.seed(3)
    assert after == random.random()
