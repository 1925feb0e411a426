"""What a step makes of its number or picks by it: tensors of the number roll at every length, and parameters of its own
roll as blocks, for each length anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import reroll

pytestmark = pytest.mark.usefixtures("double_precision")
T, B, H = 9, 3, 4
EAGER: dict[str, Any] = {"lowering": "eager", "segment": 2}
Reads = Callable[[nn.Embedding, Tensor, int, int], Tensor]

NUMBERS: dict[str, Reads] = {
    "tensor of one": lambda table, x, t, steps: x + table(torch.tensor([t])),
    "tensor": lambda table, x, t, steps: x + one_hot(torch.tensor(t), 32)[:H] + table(torch.tensor(t)),
    "as_tensor": lambda table, x, t, steps: x + table(torch.as_tensor([steps - 1 - t])),
    "new_tensor": lambda table, x, t, steps: x * x.new_tensor([[t]]),
    "share of all": lambda table, x, t, steps: x * torch.tensor([t / steps]),
    "several": lambda table, x, t, steps: x * torch.tensor([t, 0.5, 2.0 * t, 1.0]),
    "range": lambda table, x, t, steps: x + table(torch.arange(t, t + 1)),
    "window": lambda table, x, t, steps: x + table(torch.arange(t, t + 3)).sum(0),
}


class Numbered(nn.Module):
    """A recurrence whose steps make tensors of their number."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads, self.cell, self.table = reads, nn.RNNCell(H, H), nn.Embedding(32, H)

    def forward(self, x_TBH: Tensor) -> Tensor:
        h_BH = x_TBH.new_zeros(x_TBH.shape[1], H)
        for t in range(x_TBH.shape[0]):
            h_BH = self.cell(self.reads(self.table, x_TBH[t], t, x_TBH.shape[0]), h_BH)
        return h_BH


class Owning(nn.Module):
    """A recurrence with a module for each step."""

    def __init__(self, made: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ahead, self.around = nn.Linear(H, H), nn.Linear(H, H)
        self.own = nn.ModuleList(made() for _ in range(16))

    def forward(self, x_TBH: Tensor) -> Tensor:
        h_BH = torch.zeros_like(x_TBH[0])
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(self.own[t](self.around(h_BH)) + self.ahead(x_TBH[t]))
        return h_BH


def steps_of(compiled: Any, *args: Any) -> list[int]:
    return [loop.recurrence.steps for loop in reroll.explain(compiled, *args).loops]


@pytest.mark.variants(4)
@pytest.mark.parametrize("reads", NUMBERS.values(), ids=NUMBERS)
def test_tensors_of_the_number_of_a_step(reads: Reads) -> None:
    model = Numbered(reads)
    compiled = reroll.compile(model, **EAGER)
    for steps in (T, T + 4):
        report = reroll.check(compiled, torch.randn(steps, B, H), strict=True, measure=False)
        assert report
    assert steps_of(compiled, torch.randn(T, B, H)) in ([T], [T - 1])


def test_steps_with_parameters_of_their_own_are_blocks_and_no_code_for_every_length() -> None:
    model, x = Owning(lambda: nn.BatchNorm1d(H)), torch.randn(T, B, H)
    compiled = reroll.compile(model, **EAGER)
    for each in (compiled, reroll.compile(model, lowering="eager")):
        reroll.check(each, x, strict=True, measure=False)
        assert steps_of(each, x) == [T - 1]
