"""Results lie in one memory where they do in plain PyTorch: who changes one in place changes the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

pytestmark = pytest.mark.usefixtures("double_precision")
STEPS = (6, 13, 40)


def filled(x_TBI: Tensor, w_II: Tensor) -> tuple[Tensor, Tensor]:
    """An array that a loop fills, and the last state."""
    y_TBI, h_BI = torch.zeros_like(x_TBI), x_TBI[0] * 0
    for t in range(x_TBI.shape[0]):
        h_BI = torch.sin(x_TBI[t] + h_BI @ w_II)
        y_TBI[t] = h_BI * 2
    return y_TBI, h_BI


def last_row(x: Tensor, w: Tensor) -> Any:
    y, _ = filled(x, w)
    return y, y[-1]


def row_first(x: Tensor, w: Tensor) -> Any:
    y, _ = filled(x, w)
    return y[2], y, [y[-1], y[0]]


def updated(x: Tensor, w: Tensor) -> Any:
    y, _ = filled(x, w)
    row = y[-1]
    row.mul_(2)
    return y, row


def turned(x: Tensor, w: Tensor) -> Any:
    y, _ = filled(x, w)
    return y, y.transpose(0, 1)[:, 1:], y[-1].t()


def apart(x: Tensor, w: Tensor) -> Any:
    """Copies stay such."""
    y, h = filled(x, w)
    return y, y[-1].clone(), y[[0, 1]], h


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    each.__name__: each for each in (last_row, row_first, updated, turned, apart)
}


def flat(found: Any) -> list[Tensor]:
    return [each for part in found for each in ([part] if isinstance(part, Tensor) else flat(part))]


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("name", FORMS)
def test_a_change_of_one_result_changes_the_others_that_it_does_in_eager(name: str, door: str) -> None:
    form = FORMS[name]
    options: Any = {"lowering": "eager", "proof": "never"}
    run: Any = reroll.compile(form, **options)
    if door == "backend":
        run = torch.compile(form, backend="reroll", options=options)
    for steps in STEPS:
        x_TBI = torch.randn(steps, 2, 2)
        for number in range(len(flat(form(x_TBI, torch.eye(2))))):
            found = []
            for each in (form, run):
                w_II = (torch.eye(2) / 2).requires_grad_()
                results = flat(each(x_TBI, w_II))
                results[number].mul_(3)
                loss: Any = sum(value.sum() for value in results)
                loss.backward()
                found.append([*(value.detach() for value in results), w_II.grad])
            torch.testing.assert_close(found[1], found[0])


class Remembering(nn.Module):
    """Keeps what it gives, without its history."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNNCell(3, 3)
        self.states, self.last = list[Tensor](), torch.zeros(())

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI, self.states = x_TBI.new_zeros(x_TBI.shape[1], 3), []
        for x_BI in x_TBI:
            h_BI = self.cell(x_BI, h_BI)
            self.states.append(h_BI.detach())
        self.last = h_BI.detach()
        return h_BI


@pytest.mark.parametrize("steps", STEPS)
def test_what_is_kept_and_given_is_one_memory(steps: int) -> None:
    model = Remembering()
    run = reroll.compile(model, lowering="eager")
    for _ in range(2):
        h_BI = run(torch.randn(steps, 2, 3))
        h_BI.sum().backward()
        assert float(h_BI.abs().sum()) > 0
        assert not model.states[-1].requires_grad
        model.last.zero_()
        assert float(h_BI.abs().sum()) == float(model.states[-1].abs().sum()) == 0
        assert float(model.states[-2].abs().sum()) > 0
