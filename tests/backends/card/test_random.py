"""Random numbers in a step on a card: those of eager, the same in a replay, and with recordings as without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from agreement import differences
from on_card import DOORS, DOUBLE, RECORDED, SEGMENTS, Looped, agree_up_to_rounding, sequence, trained, trained_both

RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Looped(nn.GRUCell, p=0.3),
    "noise": lambda: Looped(nn.GRUCell, noise=0.5),
}

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


@pytest.mark.inductor
@pytest.mark.parametrize("schedule", ["standard", "double"])
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_recordings_are_those_of_kernels(name: str, schedule: str, card: torch.device) -> None:
    model, inputs = RANDOM[name]().double().to(card), [sequence(card, 24) for _ in range(3)]
    recorded, launched = trained_both(model, inputs, RECORDED[schedule])
    agree_up_to_rounding(recorded, launched, torch.float64)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("schedule", RECORDED)
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_eagers(name: str, schedule: str, door: str, card: torch.device) -> None:
    model, inputs = RANDOM[name]().double().to(card), [sequence(card, 24) for _ in range(3)]
    recorded, launched = trained_both(model, inputs, {**RECORDED[schedule], "lowering": "eager"}, door)
    assert not differences(recorded, launched, 0.0)
    assert not differences(recorded, trained(model, model, inputs), DOUBLE)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("name", RANDOM)
def test_a_backward_draws_what_its_forward_drew(name: str, lowering: str, card: torch.device) -> None:
    """Gradients are those of finite differences of the compiled model itself, at the same random numbers."""
    model, x_TBI = RANDOM[name]().double().to(card), sequence(card, 24)
    run = DOORS["compile"](model, **{**SEGMENTS, **RECORDED["double"], "lowering": lowering})

    def loss(shift: float) -> Tensor:
        torch.manual_seed(5)
        rows, last = run((x_TBI + shift * direction).requires_grad_())
        total: Tensor = rows.square().sum() + last.sin().sum()
        return total

    direction = torch.randn_like(x_TBI)
    loss(0.0)  # recorded
    torch.manual_seed(5)
    given = x_TBI.clone().requires_grad_()
    rows, last = run(given)
    (rows.square().sum() + last.sin().sum()).backward()
    assert given.grad is not None
    step = 1e-5
    expected = (loss(step) - loss(-step)) / (2 * step)
    torch.testing.assert_close((given.grad * direction).sum(), expected.detach(), rtol=1e-6, atol=1e-8)
