"""What ``reroll.compile`` does not record: what a record of a model's operations would not tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

import reroll
from length_networks import EAGER, H, I
from recorded_networks import Stateful
from reroll.errors import UnsupportedError

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


@pytest.mark.variants(4)
@pytest.mark.parametrize("update", [*VALUES, *OTHERS])
def test_what_a_record_does_not_tell_is_refused_as_dynamo_refuses(update: Callable[..., Any]) -> None:
    net: Any = Stateful(update)
    run = reroll.compile(net, time_dim=0, **EAGER)
    before = (net.mem, net.seen, net.norm.running_mean.clone())
    with pytest.raises(Unsupported, match=r"(?s)disable.*recorded_networks\.py") as refusal:
        run(torch.randn(16, 2, I))
    assert "cannot record" in refusal.value.__notes__[0]
    assert (net.mem, net.seen) == before[:2]
    assert torch.equal(net.norm.running_mean, before[2])
    assert not net.norm.running_mean.requires_grad


@pytest.mark.parametrize("update", [lucky, printed])
def test_what_dynamo_itself_refuses_keeps_its_line(update: Callable[..., Any]) -> None:
    class Read(Stateful):
        def step(self, x_BI: Tensor) -> None:
            self.mem = self.decay * self.mem + self.fc(x_BI)

    run = reroll.compile(Read(update), time_dim=0, **EAGER)
    with pytest.raises(Unsupported, match=rf"(?s)recorded_networks\.py.*in {update.__name__}"):
        run(torch.randn(16, 2, I))


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


def test_a_number_that_torch_has_to_know_is_refused_with_what_helps() -> None:
    """Dynamo's own error says neither what the model did nor where."""
    x = torch.randn(9, 3, H)
    with pytest.raises(UnsupportedError, match=r"value of a tensor as a number .*test_refusals.*momentum.*no time:"):
        reroll.compile(Averaged(None), time_dim=0, lowering="eager")(x)
    ways: tuple[tuple[float | None, dict[str, Any]], ...] = ((0.1, {"time_dim": 0}), (None, {}))
    for momentum, given in ways:
        model, plain = Averaged(momentum), Averaged(momentum)
        compiled = reroll.compile(model, lowering="eager", **given)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
