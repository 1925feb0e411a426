"""What ``reroll.compile`` does not record, as its operations would not tell it: Dynamo reads it, and it is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reroll
from length_networks import H, I
from recorded_networks import Stateful, agree, twins

UNKNOWN = torch.ones(H, dtype=torch.float64)


pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.filterwarnings("ignore::reroll.RerollWarning")]


def item(net: Any) -> None:
    net.mem = net.mem * net.mem.sum().item()


def number(net: Any) -> None:
    net.mem = net.mem * float(net.mem.sum())


def listed(net: Any) -> None:
    net.mem = net.mem * max(net.mem.sum(1).tolist())


def array(net: Any) -> None:
    net.mem = net.mem + torch.from_numpy(net.mem.detach().numpy().round())


def caught(net: Any) -> None:
    try:
        factor = float(net.mem.sum())
    except reroll.RerollError:
        factor = 0.5
    net.mem = net.mem * factor


def lucky(net: Any) -> None:
    net.mem = net.mem * (0.5 if torch.rand(()) > 0.5 else 0.4)


def printed(net: Any) -> None:
    print("a step")


def shown(net: Any) -> None:
    print(net.mem)


def drawn(net: Any) -> None:
    net.mem = net.mem * random.random()


def drawn_by_numpy(net: Any) -> None:
    net.mem = net.mem * float(np.random.rand())  # noqa: NPY002


def counted(net: Any) -> None:
    net.seen += 1


def from_nowhere(net: Any) -> None:
    net.mem = net.mem * globals()["unknown".upper()]  # no name that the code has


def autocast(net: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        net.mem = net.mem + net.fc(net.mem[:, :I]).double()


def written_with_gradients(net: Any) -> None:
    net.mem.add_(net.fc.bias)
    net.norm.running_mean.mul_(net.fc.bias)


class Noisy(torch.autograd.Function):
    """Draws random numbers where a record cannot see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Branching(Noisy):
    """Decides by values where a record cannot see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


def noisy(net: Any) -> None:
    net.mem = Noisy.apply(net.mem)  # type: ignore[no-untyped-call]


def branching(net: Any) -> None:
    net.mem = Branching.apply(net.mem)  # type: ignore[no-untyped-call]


VALUES = (item, number, listed, array, caught, lucky, shown, branching)
OTHERS = (printed, drawn, drawn_by_numpy, counted, from_nowhere, autocast, written_with_gradients, noisy)


class Readable(Stateful):
    """That, of which Dynamo may read the step."""

    def step(self, x_BI: Tensor) -> None:
        self.mem = 0.9 * torch.tanh(self.decay * self.mem + self.fc(x_BI))


def trained(model: Any, run: Any, calls: int = 3) -> list[Any]:
    """Results, gradients and all that is left, of calls from the same seeds; each goes on from the state before."""
    found = list[Any]()
    for call in range(calls):
        random.seed(call)
        np.random.seed(call)  # noqa: NPY002
        torch.manual_seed(call)
        model.zero_grad()
        x = torch.randn(16 if call % 2 == 0 else 9, 2, I).requires_grad_()
        y = run(x)
        y.square().sum().backward()
        left = [model.mem.detach().clone(), model.seen, model.norm.running_mean.detach().clone()]
        grads = [x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]
        found.append([y.detach(), *grads, *left, torch.rand(2), random.random(), float(np.random.rand())])  # noqa: NPY002
        model.mem, model.norm.running_mean = model.mem.detach(), model.norm.running_mean.detach()
    return found


@pytest.mark.variants(8)
@pytest.mark.parametrize("kind", [Stateful, Readable])
@pytest.mark.parametrize("update", [*VALUES, *OTHERS])
def test_what_a_record_does_not_tell_is_right_as_dynamo_reads_it(
    update: Callable[..., Any], kind: type[Stateful], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net, twin, run = twins(kind(update))
    expected, said = trained(net, net), capsys.readouterr().out
    torch.testing.assert_close(trained(twin, run), expected, rtol=1e-11, atol=1e-11)
    assert capsys.readouterr().out.count("a step") == said.count("a step")
    assert run.reroll_caller.is_read


class Averaged(torch.nn.Module):
    """A loop with a BatchNorm that counts its calls, and divides by that number."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(H, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], H)
        for x_t in x:
            h = torch.tanh(x_t + self.norm(h + x_t))
        return h


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_number_that_torch_has_to_know(momentum: float | None) -> None:
    net, twin, run = twins(Averaged(momentum))
    for steps in (9, 9, 14, 9):
        agree(net, twin, run, torch.randn(steps, 3, H), recorded=momentum is not None)
