"""The line of what a model leaves outside of itself, or decides by chance or values, and what to do instead."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import reroll
from reroll.errors import LengthError, UnsupportedError

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


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Logging, "LOG.append(x_TBI.shape[0])"),
        (Counting, "self.count += 1"),
        (Remembering, "self.history.append(h.detach())"),
        (Noting, 'self.notes["steps"] = x_TBI.shape[0]'),
    ],
)
def test_what_a_model_leaves_is_refused_at_its_line_and_the_remedy_works(kind: Any, line: str) -> None:
    model, x_TBI = kind(), torch.randn(12, 3, 4)
    LOG.clear()
    with pytest.raises((LengthError, UnsupportedError)) as raised:
        reroll.compile(model, time_dim=0, lowering="eager")(x_TBI)
    assert f": {line}" in str(raised.value)
    assert "torch.compile(backend='reroll')" in str(raised.value)
    torch._dynamo.reset()
    LOG.clear()
    model.count = 0
    compiled: Any = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    y = compiled(x_TBI)
    left = (len(LOG), model.count, len(model.history), len(model.notes))
    assert sum(left) == {Logging: 1, Counting: 12, Remembering: 12, Noting: 1}[kind]
    torch.testing.assert_close(y, Plain.forward(model, x_TBI))


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


@pytest.mark.parametrize(
    ("kind", "said", "line"),
    [
        (ByPython, "It draws from Python's random at", "random.random() < self.p"),
        (ByTruth, "It looks at values at", "torch.rand(1) < self.p"),
    ],
)
def test_scheduled_sampling_is_refused_at_its_line(kind: Any, said: str, line: str) -> None:
    random.seed(0)
    torch.manual_seed(0)
    with pytest.raises(Unsupported) as raised:
        reroll.compile(kind(), time_dim=0, lowering="eager")(torch.randn(12, 3, 4))
    (note,) = raised.value.__notes__
    assert said in note
    assert line in note.split(said)[1]
    assert "torch.where" in note


def test_scheduled_sampling_by_where_is_taken() -> None:
    model, x_TBI = ByWhere(), torch.randn(12, 3, 4)
    run = reroll.compile(model, time_dim=0, lowering="eager")
    for _ in range(2):
        torch.manual_seed(1)
        y = run(x_TBI)
        torch.manual_seed(1)
        torch.testing.assert_close(y, model(x_TBI))


class Episodes(Plain):
    """Cuts the sequence where values say so."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        ends = ((x_TBI[1:] > 9).any(-1).any(-1).nonzero().squeeze(-1) + 1).numpy().tolist()
        cuts = [0, *ends, x_TBI.shape[0]]
        return torch.cat([super(Episodes, self).forward(x_TBI[a:b]) for a, b in pairwise(cuts)])


def test_sizes_out_of_values_are_refused_at_their_line() -> None:
    told = r"value of a tensor as a number of Python's, and torch has to know it.*test_held_told.*nonzero\(\)"
    with pytest.raises(UnsupportedError, match=told):
        reroll.compile(Episodes(), time_dim=0, lowering="eager")(torch.randn(12, 3, 4))


def test_a_model_without_memory_is_refused() -> None:
    model, x_TBI = Plain().to("meta"), torch.randn(12, 3, 4, device="meta")
    torch._dynamo.reset()
    for run in (
        reroll.compile(model, time_dim=0, lowering="eager"),
        torch.compile(model, backend="reroll", options={"lowering": "eager"}),
    ):
        with pytest.raises(UnsupportedError, match="meta device, which has no values"):
            run(x_TBI)
    full = model.to_empty(device="cpu")
    assert reroll.compile(full, time_dim=0, lowering="eager")(torch.zeros(12, 3, 4)).shape == (12, 3, 4)
