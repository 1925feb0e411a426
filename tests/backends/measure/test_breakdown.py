"""breakdown: every byte of a training step is counted, once, and under the right name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import reroll
from networks import RecurrentLIF, spikes
from reroll.errors import RerollWarning, UnsupportedError

WIDTH = 256
SQUARE = WIDTH * WIDTH * 4  # bytes of a weight


class Tied(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x_BI))  # type: ignore[no-any-return]


def test_what_has_an_owner_is_counted_once() -> None:
    model, x_BI = Tied(), torch.ones(2, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model(x_BI).sum().backward()
        optimizer.step()

    first, second = reroll.breakdown(step, model, optimizer), reroll.breakdown(step, model, optimizer)
    for found in (first, second):  # the state is made by the first step
        assert (found.parameters, found.gradients) == (SQUARE + WIDTH * 4, SQUARE)
        assert found.optimizer == 2 * SQUARE + 4  # two averages and the number of steps
        assert found.recurrences == 0
        assert SQUARE <= found.rest < 4 * SQUARE
        assert found.total == found.parameters + found.gradients + found.optimizer + found.rest
    without = reroll.breakdown(step, list(model.parameters()))
    assert (without.parameters, without.optimizer) == (SQUARE, 0)


def test_recurrences_are_told_from_the_rest() -> None:
    model, x_TBI = RecurrentLIF(16, 48, 3), spikes(60, 8, 16)
    fast = reroll.compile(model, lowering="eager", schedule="standard")
    found: dict[str, Any] = {}
    for name, run in (("plain", model), ("fast", fast)):

        def step(run: Any = run) -> None:
            model.zero_grad()
            run(x_TBI).square().mean().backward()

        step()
        found[name] = reroll.breakdown(step, model)
    assert found["fast"].recurrences + found["fast"].rest == reroll.measure(step, exclude=[model]).local_peak
    assert found["plain"].recurrences == 0
    assert found["fast"].rest < 0.2 * found["plain"].rest
    predicted = reroll.explain(fast, x_TBI).loops[0].prediction.peak
    assert found["fast"].recurrences == pytest.approx(predicted, rel=0.15)
    lines = str(found["fast"]).splitlines()
    assert [line.split()[0] for line in lines] == [
        "parameters",
        "gradients",
        "optimizer",
        "recurrences",
        "rest",
        "total",
    ]
    assert lines[-1].endswith("100 %")


def test_compilation_inside_of_what_is_measured_is_told() -> None:
    model, x_TBI = RecurrentLIF(3, 4, 2), spikes(9, 2, 3)
    fast = reroll.compile(model, lowering="eager", segment=2)

    def step() -> None:
        fast(x_TBI).sum().backward()

    with pytest.warns(RerollWarning, match="measure: the call compiled a loop, which counts. Call it once before"):
        reroll.measure(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        reroll.measure(step)
        reroll.breakdown(step, model)
    torch.compiler.reset()
    fast = reroll.compile(model, lowering="eager", segment=2)
    with pytest.warns(RerollWarning, match="breakdown: the call compiled"):
        reroll.breakdown(step, model)


def test_cleared_gradients_are_refused() -> None:
    model = nn.Linear(3, 3)

    def step() -> None:
        model(torch.ones(3)).sum().backward()
        model.zero_grad()

    with pytest.raises(UnsupportedError, match=r"clear gradients at the beginning of the step, not at its end"):
        reroll.breakdown(step, model)
