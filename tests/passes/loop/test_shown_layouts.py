"""Readouts that are folded into a loop lie in memory as eager's where anything can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

EAGER: dict[str, Any] = {"lowering": "eager"}
B, T, WIDTH, HIDDEN, CLASSES = 3, 12, 4, 16, 5
Use = Callable[[Tensor, Tensor], Any]

USES: dict[str, Use] = {
    "given": lambda logits_BTC, _: logits_BTC,
    "viewed": lambda logits_BTC, y_BT: F.cross_entropy(logits_BTC.view(-1, CLASSES), y_BT.view(-1)),
    "viewed behind arithmetic": lambda logits_BTC, _: (logits_BTC * 2 + 1).view(-1).sum(),
    "given turned": lambda logits_BTC, _: logits_BTC.transpose(0, 1),
    "given beside a loss": lambda logits_BTC, y_BT: (
        F.cross_entropy(logits_BTC.flatten(0, 1), y_BT.flatten()),
        logits_BTC,
    ),
    "strides": lambda logits_BTC, _: logits_BTC.as_strided((2, 3), (1, 2)),
    "drawn alike": lambda logits_BTC, _: F.dropout(logits_BTC, 0.5),
    "drawn by another name": lambda logits_BTC, _: F.alpha_dropout(logits_BTC, 0.5, training=True).sum(),
    "whole numbers alike": lambda logits_BTC, _: (torch.randint_like(logits_BTC, 9) * logits_BTC).sum(),
    "drawn in place": lambda logits_BTC, _: (torch.zeros_like(logits_BTC).uniform_() * logits_BTC).sum(),
    "the same memory": lambda logits_BTC, _: (logits_BTC.contiguous().mul_(2), logits_BTC.sum())[1],
    "the same memory in a row": lambda logits_BTC, _: (logits_BTC.ravel().mul_(2), logits_BTC.sum())[1],
    "behind arithmetic": lambda logits_BTC, _: _updated(logits_BTC * 1),
}

LAYERED = ("given", "viewed behind arithmetic", "drawn in place", "the same memory")  # also behind a layer of torch's


def _updated(value: Tensor) -> Tensor:
    value.contiguous().add_(1)
    return value.sum()


class Readout(nn.Module):
    """A readout of all states, with the batch first."""

    def __init__(self, use: Use, layer: bool, steps_first: bool = False) -> None:
        super().__init__()
        self.use, self.steps_first = use, steps_first
        self.first, self.out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.layer = nn.GRU(HIDDEN, HIDDEN, batch_first=True) if layer else None

    def states(self, x_BTI: Tensor) -> Tensor:
        """The states of all steps."""
        x_BTH = self.first(x_BTI)
        if self.layer is not None:
            states_BTH: Tensor = self.layer(x_BTH)[0]
            return states_BTH
        h_BH, rows = x_BTH[:, 0] * 0.0, []
        for x_BH in x_BTH.unbind(1):
            h_BH = torch.tanh(x_BH + h_BH)
            rows.append(h_BH)
        return torch.stack(rows, 1)

    def forward(self, x_BTI: Tensor, y_BT: Tensor) -> Any:
        states = self.states(x_BTI)
        if self.steps_first:
            return self.use(self.out(states.transpose(0, 1)).transpose(0, 1), y_BT)
        return self.use(self.out(states), y_BT)


def data(steps: int = T) -> tuple[Tensor, Tensor]:
    """A batch, and its classes."""
    return torch.randn(B, steps, WIDTH), torch.randint(0, CLASSES, (B, steps))


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *((name, False) for name in USES),
        *((name, True) for name in LAYERED),
        *(pytest.param(name, True, marks=pytest.mark.campaign) for name in USES if name not in LAYERED),
    ],
)
def test_readouts_lie_as_in_eager(name: str, layer: bool) -> None:
    torch.manual_seed(0)
    model = Readout(USES[name], layer)
    for run in (
        reroll.compile(model, **EAGER),
        torch.compile(model, backend="reroll", options=EAGER),
    ):
        for steps in (T, T + 3):
            reroll.check(run, *data(steps), strict=True, measure=False)


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", [name for name in USES if "viewed" not in name])
def test_readouts_with_steps_first_stay_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Readout(USES[name], layer=False, steps_first=True), **EAGER)
    reroll.check(run, *data(), strict=True, measure=False)


def test_nothing_is_copied_for_a_loss() -> None:
    def loss(logits_BTC: Tensor, y_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTC.flatten(0, 1), y_BT.flatten())

    run = reroll.compile(Readout(loss, layer=False), **EAGER)
    run(*data())
    (recording,) = run.reroll_caller.at_length.recorded.recordings.values()
    targets = [node.target for node in recording.run.graph.module.graph.nodes]
    assert "contiguous" not in targets[targets.index("recurrence_0") :]
