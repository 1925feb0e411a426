"""A loop is named by the user's line in which its body begins, whichever way it was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.capture.capture import capture

pytestmark = pytest.mark.filterwarnings("ignore::reroll.RerollWarning")


def squashed(value: Tensor) -> Tensor:
    small = value * 0.5
    return torch.tanh(small)


class Squash(nn.Module):
    """A layer of somebody's, whose lines are no part of the loop."""

    def forward(self, value: Tensor) -> Tensor:
        return squashed(value)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.squash = nn.Linear(4, 4), Squash()

    def forward(self, x_TBN: Tensor) -> Tensor:
        h_BN = torch.zeros_like(x_TBN[0])
        for t in range(len(x_TBN)):
            y_BN = self.squash(x_TBN[t])  # the body begins
            h_BN = self.squash(self.cell(h_BN) + y_BN)
        return h_BN


class Unreadable(Plain):
    """The same for Dynamo's eyes only in a record."""

    def forward(self, x_TBN: Tensor) -> Tensor:
        assert isinstance(str(object()), str)
        torch._dynamo.graph_break()
        return super().forward(x_TBN)


class OneLine(Plain):
    """A body of one line, which calls several functions."""

    def forward(self, x_TBN: Tensor) -> Tensor:
        h_BN = torch.zeros_like(x_TBN[0])
        for t in range(len(x_TBN)):
            h_BN = self.squash(h_BN) + self.cell(x_TBN[t])  # all of it
        return h_BN


class Iterated(Plain):
    """Reads its steps in the line of the loop itself."""

    def forward(self, x_TBN: Tensor) -> Tensor:
        h_BN = torch.zeros_like(x_TBN[0])
        for x_BN in x_TBN:
            h_BN = self.squash(self.cell(h_BN) + x_BN)
        return h_BN


def by_hand(model: nn.Module, x: Tensor) -> Any:
    return reroll.explain(reroll.compile(model, lowering="eager"), x)


def by_torch(model: nn.Module, x: Tensor) -> Any:
    return reroll.explain(torch.compile(model, backend="reroll", options={"lowering": "eager"}), x)


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", [by_hand, by_torch])
@pytest.mark.parametrize(
    ("model", "line"), [(Plain(), "# the body begins"), (OneLine(), "# all of it"), (Iterated(), "for x_BN in x_TBN")]
)
def test_the_line_is_that_of_the_body_and_not_of_a_layer(
    model: nn.Module, line: str, door: Callable[[nn.Module, Tensor], Any]
) -> None:
    (loop,) = door(model, torch.randn(12, 2, 4)).loops
    assert loop.recurrence.where.endswith(line)
    assert ", in forward: " in loop.recurrence.where


def test_a_record_knows_the_lines_too() -> None:
    (loop,) = by_hand(Unreadable(), torch.randn(12, 2, 4)).loops
    assert loop.recurrence.where.endswith("# the body begins")


def test_a_graph_without_lines_names_a_node() -> None:
    graph = torch.fx.Graph()
    h = graph.placeholder("h")
    h.meta["example_value"] = torch.zeros(3)
    for _ in range(5):
        h = graph.call_function(torch.tanh, (h,))
        h.meta["example_value"] = torch.zeros(3)
    graph.output((h,))
    found = capture(torch.fx.GraphModule(nn.Module(), graph))
    assert [each.where for each in found.recurrences] == ["node tanh"]
