"""What is predicted of the graph around a loop, where what comes out of the loop needs no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

D = torch.float64


class Normed(nn.Module):
    """Statistics of batches in a step, of which the last stands outside of the loop, as nobody reads what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, seen = x.new_zeros(3, 4), []
        for t in range(x.shape[0]):
            seen.append(h)
            h = torch.tanh(self.norm(self.cell(x[t]) + h))
        return torch.stack(seen)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.6}], ids=["free", "budget"])
def test_statistics_of_batches_around_a_loop(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = Normed().to(D), torch.randn(31, 3, 4, dtype=D)
    model = torch.compile(net, backend="reroll", options={"lowering": "eager", **options})
    (loop,) = reroll.explain(model, x).loops
    assert loop.outer_bytes > 0
    reroll.check(model, x, strict=True, measure=False)


class Branching(nn.Module):
    """A step that takes one of two branches, of which the first step stands outside of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = self.cell(
                torch.cond(h.mean() > x[t].mean(), lambda a, b: a + b, lambda a, b: a - 0.5 * b, (x[t], h)), h
            )
        return h


@pytest.mark.filterwarnings("error::reroll.RerollWarning")
@pytest.mark.parametrize("options", [{}, {"chunk": 4}], ids=["free", "chunk"])
def test_a_branch_beside_a_loop(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = Branching().to(D), torch.randn(12, 3, 4, dtype=D, requires_grad=True)
    model = torch.compile(net, backend="reroll", options={"lowering": "eager", **options})
    assert reroll.explain(model, x).loops
    reroll.check(model, x, strict=True, measure=False)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.6}], ids=["free", "budget"])
def test_another_batch_whose_size_dynamo_makes_an_input(options: dict[str, Any]) -> None:
    torch.manual_seed(0)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], 4)
            for t in range(x.shape[0]):
                h = torch.tanh(self.cell(x[t]) + h)
            return h.expand(2, x.shape[1], 4)

    net = Wide().to(D)
    model = torch.compile(net, backend="reroll", options={"lowering": "eager", **options})
    for batch in (3, 5, 7):
        x = torch.randn(31, batch, 4, dtype=D)
        reroll.check(model, x, strict=True, measure=False)
        assert reroll.explain(model, x).loops[0].outer_bytes > 0


@pytest.mark.parametrize("schedule", ["standard", "store_all"])
def test_outputs_of_all_steps_are_held_while_a_loop_runs(schedule: str) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.wide = nn.Linear(4, 4), nn.Linear(4, 512)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, seen = x.new_zeros(x.shape[1], 4), []
            for t in range(x.shape[0]):
                h = torch.tanh(self.cell(x[t]) + h)
                seen.append((self.wide(h) > 0).to(D))
            return h, torch.stack(seen)

    torch.manual_seed(0)
    net, x = Wide().to(D), torch.randn(61, 8, 4, dtype=D)
    model = reroll.compile(net, lowering="eager", schedule=schedule)

    def step() -> None:
        model(x)[0].square().mean().backward()

    step()
    net.zero_grad()
    measured = reroll.measure(step, exclude=[net]).local_peak
    assert measured <= reroll.explain(model, x).predicted_peak <= 1.1 * measured


class Repeated(nn.Module):
    """Rows that are one row of a table, repeated, so that the batch has no memory in them; what is behind is large."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Parameter(torch.randn(31, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, seen = x.new_zeros(3, 4), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(x[t]) + h)
            seen.append(self.table[t].expand(3, -1))
        return h.sum() + torch.stack([torch.tanh(each) for each in seen])


@pytest.mark.inductor
def test_rows_that_are_repeated_come_out_of_the_loop_in_full() -> None:
    torch.manual_seed(0)
    model = torch.compile(Repeated().to(D), backend="reroll", options={"lowering": "inductor"})
    reroll.check(model, torch.randn(31, 3, 4, dtype=D), strict=True, measure=False)
