"""Functions with a gradient of their own: what a record tells of them, and what it holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
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


class Spike(Behind):
    """Is told by its operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype) * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Beside(Loop):
    """Reads an argument that has no time."""

    def forward(self, x_TBI: Tensor, bank_NI: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_TBI + bank_NI.mean(0))


def held_bytes() -> int:
    """The bytes of all tensors."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}.values())


def test_a_record_holds_no_values_of_arguments_or_of_the_run_that_it_was_made_in() -> None:
    run, x_TBI = reroll.compile(Beside(Spike), lowering="eager"), torch.randn(20, 300, 4)
    before, batch_nbytes = held_bytes(), x_TBI[0].nbytes
    for rows in (1_000, 1_001):
        run(x_TBI, torch.randn(rows, 4)).sum().backward()
    gradients = sum(each.nbytes for each in run.parameters())
    assert held_bytes() - before - gradients < batch_nbytes


@pytest.mark.parametrize("function", [Weighted, Behind, Bound])
def test_dynamo_reads_a_function_that_reads_more_than_its_operands(function: Any) -> None:
    net, twin, run = twins(Loop(function))
    for steps in (20, 31):
        agree(net, twin, run, torch.randn(steps, 3, 4), recorded=False)


def test_a_function_that_assigns_a_part_is_not_taken_for_its_other_operations() -> None:
    net, twin, run = twins(Begun(Partly), proof="never")
    for steps in (20, 31):
        agree(net, twin, run, torch.randn(steps, 3, 4))
