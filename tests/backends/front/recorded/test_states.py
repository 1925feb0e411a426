"""States of an earlier call that a model zeroes and cuts off their history, and objects among a function's operands.

The patterns are those of Sinabs: ``buffer.zero_()`` and ``buffer.detach_()`` in ``reset_states``, a surrogate object
that is given to ``autograd.Function.apply``, and an empty dict of recordings in an attribute.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from recorded_networks import read_by_dynamo

EAGER: dict[str, Any] = {"lowering": "eager", "schedule": "standard", "segment": 2, "chunk": 3}
pytestmark = pytest.mark.filterwarnings("ignore:The model asks")
D = torch.float64


@dataclass
class Surrogate:
    """The derivative of a spike."""

    width: float = 1.0

    def __call__(self, v: Tensor) -> Tensor:
        return torch.exp(-v.abs() / self.width)


class Spike(torch.autograd.Function):
    """A step, with the derivative of an object."""

    required_states = ("v",)

    @staticmethod
    def forward(ctx: Any, v: Tensor, surrogate: Surrogate, threshold: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.surrogate, ctx.threshold = surrogate, threshold
        return (v > threshold).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (v,) = ctx.saved_tensors
        return grads[0] * ctx.surrogate(v - ctx.threshold), None, None


class Layer(nn.Module):
    """A leaky neuron whose state lasts beyond a call, unless it is reset within it."""

    v: Tensor

    def __init__(self, reset: str = "zero") -> None:
        super().__init__()
        self.fc, self.reset, self.surrogate = nn.Linear(4, 4, dtype=D), reset, Surrogate()
        self.register_buffer("v", torch.zeros(3, 4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        getattr(self, self.reset)()
        states, rows = {"v": self.v}, []
        for t in range(x.shape[0]):
            states["v"] = 0.9 * states["v"] + self.fc(x[t])
            spikes: Tensor = Spike.apply(*(states[name] for name in Spike.required_states), self.surrogate, 0.5)  # type: ignore[no-untyped-call]
            states["v"] = states["v"] - spikes
            rows.append(spikes)
        self.v, self.recordings = states["v"], dict[str, Tensor]()
        return torch.stack(rows)

    def zero(self) -> None:
        """The state of no call."""
        self.v.zero_()
        self.v.detach_()

    def cut(self) -> None:
        """The state goes on, its history does not."""
        self.v = self.v.clone()
        self.v.detach_()

    def kept(self) -> None:
        """A view keeps the values from before."""
        self.before = self.v[:1]
        self.zero()

    def blank(self) -> None:
        """Zeroed, and its history kept."""
        self.v.zero_()

    def written(self) -> None:
        """Zeroed, and set anew in place."""
        self.zero()
        with torch.no_grad():
            self.v.add_(0.1)


def data(steps: int = 20) -> Tensor:
    """Sequences of 3 rows of 4 numbers."""
    return 2 * torch.randn(steps, 3, 4, dtype=D)


def trained(net: Layer, run: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of several calls one after another, and the state at the end."""
    found = []
    for x in inputs:
        net.zero_grad()
        run(x).sum().backward()
        found += [each.grad.clone() for each in net.parameters() if each.grad is not None]
    return [*found, net.v.detach()]


@pytest.mark.parametrize("reset", ["zero", "cut"])
def test_states_that_are_reset_within_the_forward_are_rolled(reset: str) -> None:
    torch.manual_seed(0)
    net = Layer(reset)
    twin = copy.deepcopy(net)
    inputs = [data(), data(), data(33), data()]
    run = reroll.compile(twin, **EAGER)
    torch.testing.assert_close(trained(twin, run, inputs), trained(net, net, inputs), rtol=1e-12, atol=1e-12)
    assert len(reroll.explain(run, data()).loops) == 1
    assert twin.recordings == {}
    assert twin.v.requires_grad


def test_a_state_that_was_handed_out_is_zeroed_and_cut_off_as_in_eager() -> None:
    torch.manual_seed(0)
    net = Layer()
    run = reroll.compile(net, **EAGER)
    for _ in range(3):
        run(data())
    state = net.v
    before = state.requires_grad
    run(data())
    assert (before, state.requires_grad) == (True, False)
    assert torch.equal(state, torch.zeros_like(state))


def test_a_look_leaves_a_state_its_history() -> None:
    torch.manual_seed(0)
    net = Layer()
    state = 2 * net.fc(torch.ones(3, 4, dtype=D))
    net.v = state
    values, run = state.detach().clone(), reroll.compile(net, **EAGER)
    reroll.explain(run, data())
    assert torch.equal(state, values)
    state.sum().backward()
    assert float(net.fc.bias.grad[0]) == 6.0  # type: ignore[index]


@pytest.mark.parametrize("reset", ["kept", "blank", "written"])
def test_other_updates_of_a_state_with_a_history_are_as_in_eager(reset: str) -> None:
    torch.manual_seed(0)
    net = Layer(reset)
    twin = copy.deepcopy(net)
    run, inputs, found = reroll.compile(twin, **EAGER), [data(), data(33), data()], list[Any]()
    for model, called in ((twin, run), (net, net)):
        found.append([])
        for x in inputs:
            model.v = 2 * model.fc(torch.ones(3, 4, dtype=D))  # a state with a history
            found[-1] += [*trained(model, called, [x]), model.v.requires_grad]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert run.reroll_caller.is_read


def test_a_number_of_an_object_that_is_set_between_calls_is_seen() -> None:
    torch.manual_seed(0)
    net = Layer()
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for width in (1.0, 0.2, 1.0):
        net.surrogate.width = twin.surrogate.width = width
        torch.manual_seed(1)
        expected = trained(net, net, [data()])
        torch.manual_seed(1)
        torch.testing.assert_close(trained(twin, run, [data()]), expected, rtol=1e-12, atol=1e-12)


def test_an_object_that_holds_tensors_is_read_by_dynamo() -> None:
    net = Layer()
    net.surrogate.width = nn.Parameter(torch.ones((), dtype=D))  # type: ignore[assignment]
    read_by_dynamo(net, data(), data(31), data())


class Emptied(nn.Module):
    """It assigns None: to an attribute that was not there, in place of a state, or in turns with one."""

    def __init__(self, assign: str) -> None:
        super().__init__()
        self.fc, self.assign = nn.Linear(4, 4, dtype=D), assign
        if assign != "new":
            self.late: Any = torch.ones(3, 4, dtype=D)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, rows = getattr(self, "late", None), []
        h_BH = torch.zeros_like(x_TBI[0]) if h_BH is None else h_BH.detach()
        empties = self.assign != "turns" or getattr(self, "late", None) is not None
        for x_BI in x_TBI:
            h_BH = torch.tanh(self.fc(h_BH) + x_BI)
            rows.append(h_BH)
        self.late = None if empties else h_BH
        return torch.stack(rows)


@pytest.mark.parametrize("assign", ["new", "reset", "turns"])
def test_none_is_assigned_as_in_eager(assign: str) -> None:
    net = Emptied(assign)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (9, 20, 20, 33):
        x_TBI = torch.randn(steps, 3, 4, dtype=D)
        assert torch.allclose(run(x_TBI), net(x_TBI), atol=1e-12)
        assert hasattr(twin, "late")
        assert (twin.late is None) == (net.late is None)
        assert net.late is None or torch.allclose(twin.late, net.late, atol=1e-12)
    assert not run.reroll_caller.is_read
