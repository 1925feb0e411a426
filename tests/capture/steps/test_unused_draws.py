"""Random numbers that nobody uses are drawn all the same: those after them would be others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks_zoo import SIZE, random_spike

EAGER: dict[str, Any] = {"lowering": "eager", "segment": 2, "proof": "never"}


class Two(torch.autograd.Function):
    """Two results, each with random numbers of its own."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Any:
        return torch.rand_like(v), v * torch.rand_like(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + grads[1]


def two(v: Tensor) -> Any:
    return Two.apply(v)  # type: ignore[no-untyped-call]


UNUSED: dict[str, Callable[[Tensor], Any]] = {
    "an operation": lambda v: torch.bernoulli(torch.sigmoid(v)),
    "a function": random_spike,
    "a function with two results": two,
    "an operation with two results": lambda v: torch.nn.functional.fractional_max_pool2d(
        v[None].expand(2, -1, -1), 2, output_size=(1, 2), return_indices=True
    ),
}
USED: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": random_spike,
    "one result of two": lambda v: two(v)[1],
    "the other": lambda v: two(v)[0],
}


class Net(nn.Module):
    """Leaky neurons that draw."""

    def __init__(self, unused: Callable[[Tensor], Any], used: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.unused, self.used = nn.Linear(SIZE, SIZE), unused, used

    def forward(self, x_TBF: Tensor) -> Tensor:
        v_BF = torch.zeros_like(x_TBF[0])
        for x_BF in x_TBF:
            v_BF = 0.9 * v_BF + self.fc(x_BF)
            self.unused(v_BF)
            v_BF = v_BF - 0.1 * self.used(v_BF)
        return v_BF


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("unused", UNUSED)
def test_random_numbers_that_nobody_uses_are_drawn(unused: str, used: str) -> None:
    run = reroll.compile(Net(UNUSED[unused], USED[used]), **EAGER)
    x_TBF = torch.randn(9, 2, SIZE)
    assert reroll.check(run, x_TBF, strict=True, measure=False).equal
    assert reroll.explain(run, x_TBF).loops
