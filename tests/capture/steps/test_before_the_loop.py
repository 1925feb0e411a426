"""What is computed before a loop by the operations of its steps is no step, and is read by all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

pytestmark = pytest.mark.usefixtures("double_precision")
STEPS, BATCH, WIDTH = 24, 3, 4
Before = Callable[["Conditioned", Tensor], Tensor]


class Conditioned(nn.Module):
    """A loop of which each step ends in ``tanh``, under a condition."""

    def __init__(self, condition: Before, end: Callable[[Tensor], Tensor], first: Before | None = None) -> None:
        super().__init__()
        self.fc, self.cell = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.condition, self.end, self.first = condition, end, first

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(BATCH, WIDTH) if self.first is None else self.first(self, x)
        k = self.condition(self, x)
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(x[t]) + k * h)
        return self.end(h)


CONDITIONS: dict[str, Before] = {
    "the first row": lambda net, x: torch.tanh(x[0]),
    "the second row": lambda net, x: torch.tanh(x[1]),
    "a mean": lambda net, x: torch.tanh(x.mean(0)),
    "a layer": lambda net, x: torch.tanh(net.fc(x[0])),
    "the same layer": lambda net, x: torch.tanh(net.cell(x[0])),
    "a step of its own": lambda net, x: torch.tanh(net.cell(x[0]) + 0.5 * x[1]),
    "two steps of its own": lambda net, x: torch.tanh(net.cell(x[1]) + torch.tanh(net.cell(x[0]) + x[1]) * x[2]),
    "two values": lambda net, x: torch.tanh(x[0]) * torch.tanh(x[1]),
}
ENDS: dict[str, Callable[[Tensor], Tensor]] = {"as it is": lambda h: h, "a sum": lambda h: h + 1, "again": torch.tanh}


@pytest.mark.variants(4)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("door", ["backend", "compile"])
def test_a_condition_made_like_a_step_is_read_by_all_steps(door: str, condition: str, end: str) -> None:
    net = Conditioned(CONDITIONS[condition], ENDS[end])
    options: dict[str, Any] = {"lowering": "eager", "schedule": "double"}
    run: Any = reroll.compile(net, **options)
    if door == "backend":
        run = torch.compile(net, backend="reroll", options=options)
    x = torch.randn(STEPS, BATCH, WIDTH, requires_grad=True)
    reroll.check(run, x, strict=True, measure=False)
    (loop,) = reroll.explain(run, x).loops
    assert loop.recurrence.steps >= STEPS - 3


def test_a_first_state_and_a_condition_made_like_a_step() -> None:
    net = Conditioned(CONDITIONS["a layer"], torch.tanh, first=CONDITIONS["a step of its own"])
    run = reroll.compile(net, lowering="eager")
    for steps in (STEPS, 40):
        reroll.check(run, torch.randn(steps, BATCH, WIDTH, requires_grad=True), strict=True, measure=False)
    assert reroll.explain(run, torch.randn(STEPS, BATCH, WIDTH)).loops[0].recurrence.steps >= STEPS - 3
