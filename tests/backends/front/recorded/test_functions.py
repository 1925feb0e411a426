"""Functions with a gradient of their own that do more than operations on their operands: what a record tells of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorded_networks import agree, twins

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.filterwarnings("ignore::reroll.RerollWarning")]
WEIGHT, BOUND = nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), torch.tensor(0.3, dtype=torch.float64)


class Weighted(torch.autograd.Function):
    """Reads a weight that is none of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ WEIGHT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad @ WEIGHT.T


class Behind(Weighted):
    """Reads one in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5


class Bound(Behind):
    """Reads a number that is a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > BOUND).to(x.dtype)


class Partly(torch.autograd.Function):
    """A spike, but for a column that is assigned."""

    @staticmethod
    def forward(ctx: Any, bound: float, slope: float, x: Tensor) -> tuple[Tensor]:
        spikes = (x > bound).to(torch.float64)
        spikes[:, 0] = 0.5
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (spikes,)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, None, grad / (1 + ctx.slope * x * x)


class Loop(nn.Module):
    """Applies a function at every step."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.fc = function, nn.Linear(4, 4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h, rows = torch.zeros(x_TBI.shape[1], 4), []
        for x in x_TBI:
            h = self.function.apply(torch.tanh(self.fc(x) + 0.9 * h))
            rows.append(h)
        return torch.stack(rows)


class Begun(Loop):
    """Before the loop it does by hand what is the function but for the assignment."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h = (torch.tanh(x_TBI[0].detach()) > 0.1).to(torch.float64)
        rows = [h]
        for x in x_TBI:
            (h,) = self.function.apply(0.1, 2.0, torch.tanh(self.fc(x) + 0.9 * h))
            rows.append(h)
        return torch.stack(rows)


@pytest.mark.parametrize("function", [Weighted, Behind, Bound])
def test_dynamo_reads_a_function_that_reads_more_than_its_operands(function: Any) -> None:
    net, twin, run = twins(Loop(function))
    for steps in (20, 31):
        agree(net, twin, run, torch.randn(steps, 3, 4), recorded=False)


def test_a_function_that_assigns_a_part_is_not_taken_for_its_other_operations() -> None:
    net, twin, run = twins(Begun(Partly), proof="never")
    for steps in (20, 31):
        agree(net, twin, run, torch.randn(steps, 3, 4))
