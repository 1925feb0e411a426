"""What Dynamo reads is compared with the plain model, which runs in its place where values differ."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.python_state.ran import Ran
from reroll.backends.front.reading import Reading
from reroll.backends.front.recorded import Recorded
from reroll.errors import ProofError, RerollWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("double_precision")


class Scaled(nn.Module):
    """A cell whose input is scaled by what a function says, which keeps something between calls."""

    def __init__(self, scale: Callable[[Any], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.scale = nn.RNNCell(3, 4), scale

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, scale = x_TBI.new_zeros(x_TBI.shape[1], 4), self.scale(self)
        for x_BI in x_TBI:
            h_BH = self.cell(x_BI * scale, h_BH)
        return h_BH


def by_dict(net: Any) -> float:
    net.__dict__.setdefault("held", [0.9]).append(0.9)
    return 1 / len(net.held)


def by_number(net: Any) -> float:
    vars(net).setdefault("number", 0)
    net.number += 1
    return 1 / float(net.number)


def cached() -> Callable[[Any], float]:
    @functools.lru_cache(None)
    def held(_: int) -> list[float]:
        return [0.9]

    def scale(_: Any) -> float:
        held(0).append(0.8)
        return 1 / sum(held(0))

    return scale


def bounded() -> Callable[[Any], float]:
    @functools.lru_cache(4)
    def held(_: int) -> dict[str, float]:
        return {"n": 0.5}

    def scale(_: Any) -> float:
        held(0)["n"] *= 0.5
        held(1)["n"] *= 0.7
        return held(0)["n"] + held(1)["n"]

    return scale


UNSEEN = {
    "an attribute set by its dict": lambda: by_dict,
    "a number set by its dict": lambda: by_number,
    "a cached list": cached,
    "cached dicts": bounded,
}


def alike(run: Callable[[Tensor], Tensor], plain: nn.Module) -> None:
    for steps in (6, 14, 6, 6, 9, 6):
        x_TBI = torch.randn(steps, 2, 3)
        torch.testing.assert_close(run(x_TBI), plain(x_TBI))


@pytest.mark.parametrize("unseen", UNSEEN.values(), ids=UNSEEN)
def test_what_dynamo_does_not_see_is_right_and_said(unseen: Callable[[], Callable[[Any], float]]) -> None:
    plain = Scaled(unseen())
    run = reroll.compile(Scaled(unseen()), lowering="eager")
    with pytest.warns(RerollWarning, match="runs as plain PyTorch from now on") as told:
        alike(run, plain)
    assert sum("from now on" in str(each.message) for each in told) == 1


def test_a_proof_that_is_asked_for_raises_and_changes_nothing() -> None:
    model = Scaled(by_dict)
    run = reroll.compile(model, lowering="eager", proof="always")
    run(torch.randn(6, 2, 3))
    run(torch.randn(14, 2, 3))
    held = list(model.held)  # type: ignore[arg-type]
    with pytest.raises(ProofError, match="does not give what the model gives"):
        run(torch.randn(6, 2, 3))
    assert model.held == held


class Cached(nn.Module):
    """As masks and tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(3, 4)

    @staticmethod
    @functools.lru_cache(None)
    def table(steps: int) -> Tensor:
        return torch.linspace(0, 1, steps)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, table_T = x_TBI.new_zeros(x_TBI.shape[1], 4), self.table(x_TBI.shape[0])
        for t, x_BI in enumerate(x_TBI):
            h_BH = self.cell(x_BI * table_T[t], h_BH)
        return h_BH


def test_cached_tensors_are_rolled() -> None:
    model = Cached()
    run = reroll.compile(model, lowering="eager", on_no_recurrence="error")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        for steps in (6, 14, 6):
            x_TBI = torch.randn(steps, 2, 3)
            torch.testing.assert_close(run(x_TBI), model(x_TBI))


class Counting(nn.Module):
    """Keeps a list that Dynamo sees."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.seen = nn.RNNCell(3, 4), list[int]()

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 4)
        self.seen.append(len(x_TBI))
        for x_BI in x_TBI:
            h_BH = self.cell(x_BI, h_BH)
        return h_BH


def test_what_dynamo_sees_stays_compiled() -> None:
    model = Counting()
    twin, run = copy.deepcopy(model), reroll.compile(model, lowering="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        for _ in range(4):
            x_TBI = torch.randn(6, 2, 3)
            torch.testing.assert_close(run(x_TBI), twin(x_TBI))
    assert model.seen == twin.seen == [6] * 4


class Deciding(nn.Module):
    """Gives one where its operand is above a threshold, at which it is."""

    def __init__(self, decides: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.decides = nn.Parameter(torch.tensor(0.7)), decides

    def forward(self, x: Tensor) -> Tensor:
        operand = self.weight * x
        return self.decides(operand, torch.full_like(x, 0.7)).to(x.dtype) * operand


@pytest.mark.parametrize(("moved", "stays"), [(0.0, True), (0.1, False)])
def test_a_decision_may_fall_the_other_way_within_rounding(moved: float, stays: bool) -> None:
    model, reads = Deciding(torch.gt), Deciding(lambda a, b: a >= b - moved)
    x = torch.ones(5) - torch.arange(5) * moved / 8
    reading = Reading(Recorded(model), reroll.Options(lowering="eager"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RerollWarning)
        reading.runs(Call((x,), {}), reads, Ran())
    assert reading.plain is not stays
    assert bool(told) is not stays


class Sloped(torch.autograd.Function):
    """Spikes whose backward reads a number: torch's Dynamo fails where that number is another one at the next call."""

    @staticmethod
    def forward(ctx: Any, v_BH: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(v_BH)
        ctx.slope = slope
        return (v_BH > 0).to(v_BH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BH: Tensor) -> Any:
        (v_BH,) = ctx.saved_tensors
        return grad_BH / (1 + ctx.slope * v_BH.abs()) ** 2, None


class Annealed(nn.Module):
    """Spikes with a slope that the user sets from call to call; calls are counted, which no record tells."""

    def __init__(self, *, begun: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.slope, self.calls, self.begun = nn.Linear(3, 4), 5.0, 0, begun

    def forward(self, x_TBI: Tensor) -> Tensor:
        if self.begun:
            torch._dynamo.graph_break()
            self.calls += 1
        v_BH, spikes_BH = x_TBI.new_zeros(x_TBI.shape[1], 4), 0.0
        for x_BI in x_TBI:
            v_BH = 0.8 * v_BH + self.fc(x_BI)
            spikes_BH = spikes_BH + Sloped.apply(v_BH - 0.1, self.slope)  # type: ignore[no-untyped-call]
        self.calls += 1
        return spikes_BH  # type: ignore[return-value]


def annealed(run: Any, net: Annealed) -> list[Tensor]:
    """Results and gradients of calls with smaller and smaller slopes."""
    torch.manual_seed(1)
    found = []
    for slope in (5.0, 2.0, 1.0):
        net.slope = slope
        net.zero_grad()
        y_BH = run(torch.randn(6, 2, 3))
        y_BH.sum().backward()
        assert net.fc.weight.grad is not None
        found += [y_BH.detach(), net.fc.weight.grad.clone()]
    return found


@pytest.mark.parametrize("proof", ["first", "never"])
def test_where_dynamo_fails_the_model_runs_plainly_and_that_is_said(proof: Any) -> None:
    plain, net = Annealed(), Annealed()
    run = reroll.compile(net, lowering="eager", proof=proof)
    with pytest.warns(RerollWarning, match=r"fails with an error of its own at .*test_reading.py:\d+: AssertionError"):
        found = annealed(run, net)
    torch.testing.assert_close(found, annealed(plain, plain))
    assert net.calls == plain.calls


@pytest.mark.parametrize("asked", [{"on_no_recurrence": "error"}, {"truncate": 2}])
def test_where_dynamo_fails_and_loops_are_asked_for_that_is_refused(asked: Any) -> None:
    net = Annealed()
    with pytest.raises(UnsupportedError, match="fails with an error of its own"):
        annealed(reroll.compile(net, lowering="eager", **asked), net)


def test_where_dynamo_fails_in_the_middle_nothing_runs_twice() -> None:
    net = Annealed(begun=True)
    with pytest.raises(UnsupportedError, match="A part of the model had run"):
        annealed(reroll.compile(net, lowering="eager", proof="never"), net)


class Mistaken(Annealed):
    """A model that raises, at a line that Dynamo reads."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        return super().forward(x_TBI) @ x_TBI.new_zeros(5, 5)


def test_what_the_model_raises_is_no_error_of_dynamos() -> None:
    net = Mistaken()
    run = reroll.compile(net, lowering="eager", proof="never")
    x_TBI = torch.randn(6, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"size|shape"):
                run(x_TBI)
