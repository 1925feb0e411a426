"""Models that ask whether a value is true: recorded with the answers, which are compared at every call.

The patterns are those of torchdiffeq (assertions on times that are arguments) and of xlstm (a state that is zero before
the first step).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from recorded_networks import agree, read_by_dynamo, twins

EAGER: dict[str, Any] = {"lowering": "eager", "schedule": "standard", "segment": 2, "chunk": 3}
pytestmark = pytest.mark.filterwarnings("ignore:The model asks")
D = torch.float64


def data(steps: int = 20) -> Tensor:
    """Sequences of 3 rows of 4 numbers."""
    return torch.randn(steps, 3, 4, dtype=D, requires_grad=True)


class Timed(nn.Module):
    """Times that are an argument, and have to rise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=D)

    def forward(self, y: Tensor, times: Tensor) -> Tensor:
        falls = times[1:] < times[:-1]
        assert falls.all() or (~falls).all(), "times rise or fall"
        sign = -1.0 if falls.any() else 1.0
        rows = [y]
        for before, after in pairwise(times):
            rows.append(rows[-1] + sign * (after - before) * torch.tanh(self.fc(rows[-1])))
        return torch.stack(rows)


def grid(steps: int, last: float = 3.0) -> Tensor:
    """Times from 0."""
    return torch.linspace(0.0, last, steps, dtype=D)


def test_answers_about_arguments_are_recorded() -> None:
    torch.manual_seed(0)
    run = reroll.compile(Timed(), **EAGER)
    y = torch.randn(3, 4, dtype=D, requires_grad=True)
    for steps in (20, 33, 20):
        reroll.check(run, y, grid(steps), strict=True, measure=False)
    assert len(reroll.explain(run, y, grid(20)).loops) == 1


def test_from_another_answer_on_dynamo_reads_the_model() -> None:
    net, twin, run = twins(Timed(), **EAGER)
    y = torch.randn(3, 4, dtype=D)
    agree(net, twin, run, y, grid(20))
    with pytest.warns(reroll.RerollWarning, match=r"Another answer was given .*assert falls.all\(\)"):
        agree(net, twin, run, y, grid(20, last=-3.0), recorded=False)
    for steps, last in ((20, 5.0), (33, -5.0)):
        agree(net, twin, run, y, grid(steps, last), recorded=False)


def test_the_lines_that_ask_are_named_in_the_warning() -> None:
    run = reroll.compile(Timed(), **EAGER)
    with pytest.warns(reroll.RerollWarning, match=r"(?s)asks .*falls.all\(\).*are compared at every call.*where"):
        run(torch.randn(3, 4, dtype=D), grid(20))


class Stabilised(nn.Module):
    """A state that is zero before the first step, and never again (xlstm's sLSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        n = m = torch.zeros(3, 4, dtype=D)
        rows = []
        for t in range(x.shape[0]):
            i = self.fc(x[t])
            m = i if torch.all(n == 0.0) else torch.maximum(m, i)
            n = 0.9 * n + torch.exp(i - m)
            rows.append(n)
        return torch.stack(rows)


@pytest.mark.parametrize("options", [{}, {"schedule": "store_all"}, {"schedule": "double", "verify": True}])
def test_a_question_in_every_step_is_answered_by_the_program(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Stabilised(), lowering="eager", segment=2, **options)
    for steps in (20, 31):
        reroll.check(run, data(steps), strict=True, measure=False)
    assert len(reroll.explain(run, data()).loops) == 1


def test_an_answer_that_differs_in_one_late_step_is_seen() -> None:
    class Clipped(Stabilised):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(3, 4, dtype=D)
            for t in range(x.shape[0]):
                h = torch.tanh(self.fc(x[t]) + h)
                if (x[t].detach().abs() > 100).any():
                    h = h * 0.0
            return h

    net, twin, run = twins(Clipped(), **EAGER)
    for _ in range(2):
        agree(net, twin, run, data())
    x = data().detach()
    x[17, 1, 2] = 1e3
    with pytest.warns(reroll.RerollWarning, match="Another answer"):
        agree(net, twin, run, x, recorded=False)
    agree(net, twin, run, data(31), recorded=False)


class Updated(nn.Module):
    """A constant that takes a value from an input is none any more, nor is what is made of it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4, dtype=D)
        part = mask[1:]
        part.copy_(x[0, 0, 1:].detach())
        h = torch.zeros(3, 4, dtype=D)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h)
        return -h if mask.sum() > 0 else h


def test_what_was_a_constant_and_is_updated_is_asked_at_every_call() -> None:
    net, twin, run = twins(Updated(), **EAGER)
    x = data().detach()
    for value in (1.0, 2.0, -1.0, 1.0):
        x[0, 0] = value
        agree(net, twin, run, x, recorded=value > 0 and not run.reroll_caller.is_read)


def test_a_branch_on_random_numbers_is_read_by_dynamo() -> None:
    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(3, 4, dtype=D)
            sign = -1.0 if (torch.rand(()) > 0.5) else 1.0
            for t in range(x.shape[0]):
                h = torch.tanh(x[t] + sign * h)
            return h

    read_by_dynamo(Drawn(), data(), data(31), data())
