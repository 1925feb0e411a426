"""The line of what a model leaves outside of itself, or decides by chance or values, and what to do instead."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from recorded_networks import agree, twins
from reroll.errors import UnsupportedError

LOG = list[Any]()


class Plain(nn.Module):
    """A GRU's states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.p = nn.GRUCell(4, 4), nn.Linear(4, 4), 0.5
        self.count, self.history, self.notes = 0, list[Tensor](), dict[str, Any]()

    def step(self, x_BI: Tensor, h: Tensor) -> Any:
        return self.cell(x_BI, h)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h, rows = x_TBI.new_zeros(3, 4), []
        for t in range(x_TBI.shape[0]):
            h = self.step(x_TBI[t], h)
            rows.append(h)
        return torch.stack(rows)


class Logging(Plain):
    def forward(self, x_TBI: Tensor) -> Tensor:
        LOG.append(x_TBI.shape[0])
        return super().forward(x_TBI)


class Counting(Plain):
    def step(self, x_BI: Tensor, h: Tensor) -> Any:
        self.count += 1
        return self.cell(x_BI, h)


class Remembering(Plain):
    def step(self, x_BI: Tensor, h: Tensor) -> Tensor:
        h = self.cell(x_BI, h)
        self.history.append(h.detach())
        return h


class Noting(Plain):
    def forward(self, x_TBI: Tensor) -> Tensor:
        self.notes["steps"] = x_TBI.shape[0]
        return super().forward(x_TBI)


@pytest.mark.parametrize("kind", [Logging, Counting, Remembering, Noting])
def test_what_a_model_leaves_is_left_once_a_call(kind: Any) -> None:
    plain = kind()
    model = copy.deepcopy(plain)
    run, lengths, found = reroll.compile(model, lowering="eager"), (12, 20, 12, 12), list[Any]()
    xs = [torch.randn(steps, 3, 4) for steps in lengths]
    for each, called in ((model, run), (plain, plain)):
        LOG.clear()
        found.append(list[Any]())
        for x in xs:
            each.zero_grad()
            y = called(x)
            y.square().sum().backward()
            grads = [value.grad.clone() for value in each.cell.parameters()]
            found[-1] += [y.detach(), *grads, len(LOG), each.count, len(each.history), len(each.notes)]
        found[-1] += [*LOG, *each.history, *each.notes.values()]
    torch.testing.assert_close(*found)


class Scheduled(Plain):
    """Its own output or the true one is the next input, by chance (scheduled sampling)."""

    def chosen(self, given: Tensor, own: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_TBI: Tensor) -> Tensor:
        h, own, rows = x_TBI.new_zeros(3, 4), x_TBI[0], []
        for t in range(x_TBI.shape[0]):
            h = self.cell(self.chosen(x_TBI[t], own), h)
            own = self.out(h)
            rows.append(own)
        return torch.stack(rows)


class ByPython(Scheduled):
    def chosen(self, given: Tensor, own: Tensor) -> Tensor:
        return given if random.random() < self.p else own


class ByTruth(Scheduled):
    def chosen(self, given: Tensor, own: Tensor) -> Tensor:
        return given if torch.rand(1) < self.p else own


class ByWhere(Scheduled):
    def chosen(self, given: Tensor, own: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < self.p, given, own)


@pytest.mark.parametrize("kind", [ByPython, ByTruth, ByWhere])
@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_scheduled_sampling_draws_what_it_draws_without_reroll(kind: Any) -> None:
    plain = kind()
    model = copy.deepcopy(plain)
    run = reroll.compile(model, lowering="eager")
    for seed, steps in enumerate((12, 20, 12, 12)):
        x, found = torch.randn(steps, 3, 4), list[Any]()
        for each, called in ((model, run), (plain, plain)):
            random.seed(seed)
            torch.manual_seed(seed)
            each.zero_grad()
            y = called(x)
            y.square().sum().backward()
            grads = [value.grad.clone() for value in each.parameters()]
            found.append([y.detach(), *grads, torch.rand(2), random.random()])
        torch.testing.assert_close(*found)
    assert run.reroll_caller.is_read is (kind is not ByWhere)


class Episodes(Plain):
    """Cuts the sequence where values say so."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        ends = ((x_TBI[1:] > 9).any(-1).any(-1).nonzero().squeeze(-1) + 1).numpy().tolist()
        cuts = [0, *ends, x_TBI.shape[0]]
        return torch.cat([super(Episodes, self).forward(x_TBI[a:b]) for a, b in pairwise(cuts)])


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_sizes_out_of_values_are_right() -> None:
    net, twin, run = twins(Episodes().double())
    for steps, at in ((12, 5), (20, 9), (12, 2), (12, 5)):
        x_TBI = torch.randn(steps, 3, 4, dtype=torch.float64)
        x_TBI[at] = 10.0
        agree(net, twin, run, x_TBI, recorded=False)


def test_a_model_without_memory_is_refused() -> None:
    model, x_TBI = Plain().to("meta"), torch.randn(12, 3, 4, device="meta")
    torch._dynamo.reset()
    for run in (
        reroll.compile(model, lowering="eager"),
        torch.compile(model, backend="reroll", options={"lowering": "eager"}),
    ):
        with pytest.raises(UnsupportedError, match="meta device, which has no values"):
            run(x_TBI)
    full = model.to_empty(device="cpu")
    assert reroll.compile(full, lowering="eager")(torch.zeros(12, 3, 4)).shape == (12, 3, 4)
