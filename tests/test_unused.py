"""Functions whose backward gives something where nothing comes in, at steps that the loss does not use."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends import unused
from reroll.errors import RerollWarning, UnsupportedError

Loss = Callable[[Any], Tensor]


class Aux(torch.autograd.Function):
    """The identity, with an auxiliary loss: the sum of its input, times 0.5."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.5


@torch.library.custom_op("tests_unused::aux", mutates_args=())
def aux(y: Tensor) -> Tensor:
    """The same as an operator of one's own."""
    return y.clone()


aux.register_fake(torch.empty_like)
aux.register_autograd(lambda ctx, grad: grad + 0.5)


class Surrogate(torch.autograd.Function):
    """A spike whose gradient is linear in what comes in."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return (y > 0).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return grad / (1 + y.abs()) ** 2


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {"Aux": Aux.apply, "operator": aux, "Surrogate": Surrogate.apply}


class Net(nn.Module):
    """A tanh RNN with a function on its ``place``, the carry or the outputs, that ``gives`` a list, or all stacked."""

    def __init__(self, function: Callable[[Tensor], Tensor], place: str, gives: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.function, self.place, self.gives = function, place, gives

    def forward(self, x_TBI: Tensor) -> Any:
        h_BH, out = x_TBI.new_zeros(x_TBI.shape[1], 6), []
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.a(x_TBI[t]) + self.b(h_BH))
            if self.place == "carry":
                h_BH = self.function(h_BH)
            out.append(self.function(h_BH) if self.place == "outputs" else h_BH * 2)
        return (out if self.gives == "list" else torch.stack(out)), h_BH


def total(values: Any) -> Tensor:
    """The sum of all there is."""
    return values.sum() if isinstance(values, Tensor) else torch.stack([total(each) for each in values]).sum()


LOSSES: dict[str, Loss] = {
    "all": lambda found: total(found[0]) + total(found[1]),
    "outputs": lambda found: total(found[0]),
    "carry": lambda found: total(found[1]),
    "last": lambda found: total(found[0][-1]),
    "early": lambda found: total(found[0][3]),
    "some": lambda found: total(found[0][3]) + total(found[1]),
}
WRONG = {
    ("outputs", "stacked"): {"carry"},
    ("outputs", "list"): {"carry", "last", "early", "some"},
    ("carry", "stacked"): set[str](),
    ("carry", "list"): {"early"},
}


@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize(("place", "gives"), WRONG)
@pytest.mark.parametrize("own", ["Aux", "operator", "Surrogate"])
def test_gradients_are_those_of_eager_or_refused(own: str, place: str, gives: str, way: str) -> None:
    model, x = Net(FUNCTIONS[own], place, gives).double(), torch.randn(20, 3, 4).double()
    options: dict[str, Any] = {"lowering": "eager", "segment": 4}
    backend: Any = torch.compile(model, backend="reroll", options=options)
    run = backend if way == "backend" else reroll.compile(model, time_dim=0, **options)
    parameters, wrong = list(model.parameters()), WRONG[place, gives]
    for name, loss in [*LOSSES.items(), *LOSSES.items()]:
        plain = torch.autograd.grad(loss(model(x)), parameters)
        if own != "Surrogate" and name in wrong:
            with pytest.raises(UnsupportedError, match="function of your own"):
                torch.autograd.grad(loss(run(x)), parameters)
            whole = [loss(found) + 0 * LOSSES["all"](found) for found in (run(x), model(x))]
            torch.testing.assert_close(*(torch.autograd.grad(each, parameters) for each in whole))
        else:
            torch.testing.assert_close(torch.autograd.grad(loss(run(x)), parameters), plain)


def test_a_graph_that_is_kept_is_looked_at_each_time() -> None:
    model, x = Net(Aux.apply, "outputs", "list").double(), torch.randn(20, 3, 4).double()
    out, _ = reroll.compile(model, time_dim=0, lowering="eager", segment=4)(x)
    total(out).backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="function of your own"):
        total(out[5]).backward(retain_graph=True)
    expected = torch.autograd.grad(total(model(x)[0]), list(model.parameters()))
    found = torch.autograd.grad(total(out), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_where_it_cannot_be_looked_at_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no step today\nat all")

    model, x = Net(Surrogate.apply, "outputs", "stacked").double(), torch.randn(20, 3, 4).double()
    plain = torch.autograd.grad(total(model(x)), list(model.parameters()))
    run = reroll.compile(model, time_dim=0, lowering="eager", segment=4)
    monkeypatch.setattr(unused, "_step", fail)
    with pytest.warns(RerollWarning, match=r"cannot be run by itself \(no step today\)"):
        found = torch.autograd.grad(total(run(x)), list(model.parameters()))
    torch.testing.assert_close(found, plain)
