"""Evaluation runs the forward halves that training has, once compiled segments have taken over there.

B batch, T time, I inputs, N neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import run_by_torch
from networks import Spike
from reroll.backends.construct import lent
from reroll.backends.construct.stages import takeover
from reroll.backends.construct.stages.takeover import CALL
from reroll.backends.inductor import lower

T = 11


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled segments take over as soon as they may, and torch runs what would be compiled."""
    monkeypatch.setattr(takeover, "COMPILING", 0.0)
    monkeypatch.setattr(takeover, "_AHEAD", (1 << 30, 0.0))
    monkeypatch.setattr(lower, "_inductor", run_by_torch)
    with mock.patch.object(lent, "LENDERS", lent.Lenders()) as lenders, mock.patch.object(takeover, "LENDERS", lenders):
        yield


class Spiking(nn.Module):
    """A layer of spiking neurons, its readout, and layers that are used in training alone, or otherwise there."""

    def __init__(self, drop: float = 0.0, *, norm: bool = False, leak: float = 0.9) -> None:
        super().__init__()
        self.taken, self.back, self.leak = nn.Linear(3, 4), nn.Linear(4, 4), leak
        self.drop, self.norm = nn.Dropout(drop), nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BN = x_TBI.new_zeros(x_TBI.shape[1], 4)
        s_BN, sum_BN = v_BN, v_BN
        for t in range(x_TBI.shape[0]):
            v_BN = self.leak * v_BN * (1 - s_BN) + self.norm(self.taken(x_TBI[t]) + self.drop(self.back(s_BN)))
            s_BN = Spike.apply(v_BN - 0.3)  # type: ignore[no-untyped-call]
            sum_BN = sum_BN + s_BN + 0.1 * v_BN
        return sum_BN


def through(door: str, model: nn.Module) -> Callable[..., Any]:
    if door == "front":
        run: Callable[..., Any] = reroll.compile(model, start="eager")
        return run
    return torch.compile(model, backend="reroll", options={"start": "eager"})


def train(run: Callable[..., Any], calls: int = CALL + 1, steps: int = T) -> None:
    for _ in range(calls):
        run(torch.randn(steps, 2, 3)).sum().backward()


def evaluated(model: nn.Module, run: Callable[..., Any], x_TBI: Tensor) -> tuple[bool, bool]:
    """What evaluation runs is right; whether segments are lent to it, and whether it compiles any."""
    find, lower_it = lent.Lenders.find, lower._lowered
    found, lowerings = list[Any](), list[str]()

    def finding(self: Any, *args: Any) -> Any:
        found.append(find(self, *args))
        return found[-1]

    def lowering(traced: Any, how: str, products: Any) -> Any:
        lowerings.append(how)
        return lower_it(traced, how, products)

    model.eval()
    with (
        mock.patch.object(lent.Lenders, "find", finding),
        mock.patch.object(lower, "_lowered", lowering),
        torch.no_grad(),
    ):
        for _ in range(2):
            torch.testing.assert_close(run(x_TBI), model(x_TBI))
    model.train()
    return bool(found), "inductor" in lowerings


@pytest.mark.parametrize(("door", "before"), [("front", True), ("front", False), ("backend", True)])
def test_evaluation_takes_the_forward_of_training(door: str, before: bool) -> None:
    """Whether or not it was called before; training goes on with its tapes."""
    torch.manual_seed(0)
    model, x_TBI = Spiking(), torch.randn(T, 2, 3)
    run = through(door, model)
    if before:
        train(run, 2)
        assert evaluated(model, run, x_TBI) == (False, False)
    train(run)
    assert evaluated(model, run, x_TBI) == (True, False)
    gradients = [torch.autograd.grad(f(x_TBI).sum(), [*model.parameters()]) for f in (run, model)]
    for mine, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, plain)
    if before:
        model.eval()
        with torch.no_grad():
            assert "forward halves of training" in reroll.explain(run, x_TBI).proved


def test_other_lengths_take_it_where_their_segments_are_there() -> None:
    torch.manual_seed(0)
    model = Spiking()
    run = through("front", model)
    train(run, steps=12)
    lengths = {tuple(each.kernels.compiled.segments) for each in lent.LENDERS._found}
    assert evaluated(model, run, torch.randn(12 + 2 * max(max(lengths)), 2, 3)) == (True, False)
    found = {evaluated(model, run, torch.randn(12 + more, 2, 3)) for more in range(1, max(max(lengths)))}
    assert (False, False) in found, "eager segments, which are not compiled for it"


@pytest.mark.parametrize(
    "model",
    [pytest.param(Spiking(0.5), id="dropout"), pytest.param(Spiking(norm=True), id="statistics of a batch")],
)
def test_what_evaluates_otherwise_takes_nothing(model: nn.Module) -> None:
    """A forward of training would drop values, or use what the batch has."""
    run = reroll.compile(model, start="eager", proof="never")  # torch draws otherwise than compiled code
    train(run)
    assert evaluated(model, run, torch.randn(T, 2, 3)) == (False, False)


def test_another_model_takes_what_does_the_same_alone() -> None:
    """The same operations on the same shapes, with other weights; not with another constant."""
    train(through("front", Spiking()))
    same, other = Spiking(), Spiking(leak=0.8)
    assert evaluated(same, through("front", same), torch.randn(T, 2, 3)) == (True, False)
    assert evaluated(other, through("front", other), torch.randn(T, 2, 3)) == (False, False)
    assert evaluated(same, through("front", same), torch.randn(T, 5, 3)) == (False, False)


def test_what_is_compiled_otherwise_takes_nothing() -> None:
    """By other passes, or other settings of torch."""
    train(through("front", Spiking()))
    model = Spiking()
    run = reroll.compile(model, start="eager", passes=[])
    assert evaluated(model, run, torch.randn(T, 2, 3)) == (False, False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        assert evaluated(model, through("front", model), torch.randn(T, 2, 3)) == (False, False)
    finally:
        torch.set_float32_matmul_precision(before)
    assert evaluated(model, through("front", model), torch.randn(T, 2, 3)) == (True, False)


def test_a_step_that_cannot_be_looked_at_takes_nothing() -> None:
    """Evaluation goes on with eager segments."""
    train(through("front", Spiking()))
    model = Spiking()
    with mock.patch.object(lent, "trace", side_effect=AssertionError("of torch's own")):
        assert evaluated(model, through("front", model), torch.randn(T, 2, 3)) == (False, False)


def test_what_is_lent_does_not_grow_without_bounds() -> None:
    lenders = lent.Lenders()
    train(through("front", Spiking()))
    (found,) = lent.LENDERS._found
    for _ in range(40):
        lenders.add(found.kernels, reroll.Options())
    assert len(lenders._found) == lent._MOST
    assert lenders.count == 40
