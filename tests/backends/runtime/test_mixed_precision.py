"""Autocast and gradient scaling: as exact as eager autocast, and the same steps are skipped."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import reroll
from trained import DOORS, NETWORKS, WIDTH, GatedReader, distance, reversals, spiking, through_front, trained_alike

LENGTHS = (12, 15, 12)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=("bfloat16", "float16"))


def sequence(steps: int) -> Tensor:
    """Inputs that drive spikes, too."""
    return 2 * (torch.rand(steps, 5, WIDTH) < 0.4).float() + 0.1 * torch.randn(steps, 5, WIDTH)


def gradients(run: Any, model: nn.Module, x_TBI: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients, under autocast to ``dtype`` if there is one."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        out: Tensor = run(x_TBI)
    out.double().square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return out.detach(), [grad for grad in found if grad is not None]


def as_exact_as_eager(run: Any, model: nn.Module, dtype: torch.dtype) -> None:
    """Train some steps; at each, outputs and gradients are as near to those of float64 as eager autocast's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with reversals() as count:
        for steps in LENGTHS:
            x_TBI = sequence(steps)
            plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
            out, ours = gradients(run, model, x_TBI, dtype)
            expected, theirs = gradients(plain, plain, x_TBI, dtype)
            true_out, true = gradients(exact, exact, x_TBI.double(), None)
            assert out.dtype is expected.dtype
            assert distance([out], [true_out]) <= 1.5 * distance([expected], [true_out])
            assert distance(ours, true) <= 1.5 * distance(theirs, true)
            optimizer.step()
        assert count() == len(LENGTHS)


@pytest.mark.variants(4)
@HALVES
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_autocast_is_as_exact_as_eager(door: Any, make: Any, dtype: torch.dtype) -> None:
    model = make()
    as_exact_as_eager(door(model), model, dtype)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("make", "dtype"), [pytest.param(GatedReader, torch.bfloat16, marks=pytest.mark.campaign), (spiking, torch.float16)]
)
def test_autocast_with_inductor(make: Any, dtype: torch.dtype) -> None:
    model = make()
    as_exact_as_eager(through_front(model, lowering="inductor"), model, dtype)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_weights_used_again_in_the_same_autocast_region_get_both_gradients(door: Any) -> None:
    model = GatedReader()
    plain, run = copy.deepcopy(model), door(model)
    found = []
    for net, call in ((model, run), (plain, plain)):
        torch.manual_seed(1)
        x_TBI = sequence(12)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # it keeps casts of weights until it ends
            first = call(x_TBI)
            second = net.out(net.cell(x_TBI[0], x_TBI.new_zeros(5, 8)))
        (first.float().square().mean() + 9 * second.float().square().mean()).backward()
        found.append([parameter.grad for parameter in net.parameters()])
    ours, theirs = ([grad for grad in grads if grad is not None] for grads in found)
    assert distance(ours, theirs) < 0.02


def scaled_steps(run: Any, model: nn.Module, inputs: Sequence[Tensor]) -> list[float]:
    """Train with a scale that overflows float16 in the first step, and again after it has grown; gives the scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=2.0**30, growth_interval=2, growth_factor=2.0**14, backoff_factor=2.0**-14)
    scales = []
    for x_TBI in inputs:
        optimizer.zero_grad()
        before = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run(x_TBI).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
        skipped = scaler.get_scale() < scales[-1]
        kept = all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        assert kept is skipped
    return scales


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_scaled_float16_skips_the_steps_that_eager_skips(door: Any, make: Any) -> None:
    start = make()
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    inputs = [sequence(steps) for steps in (12, 15, 12, 12, 15)]
    with reversals() as count:
        scales = scaled_steps(door(model), model, inputs)
        assert count() == len(inputs)
    assert scales == scaled_steps(plain, plain, inputs) == [2.0**30, 2.0**16, 2.0**16, 2.0**30, 2.0**16]
    trained_alike(model, plain, start, 0.01)


class NormedReader(nn.Module):
    """A loop with batch norm, and outputs beside its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.again, self.norm = nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH, rows = x_TBI.new_zeros(x_TBI.shape[1], 5), []
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.norm(self.read(x_TBI[t])) + self.again(h_BH))
            rows.append(h_BH * 2)
        return torch.stack(rows), h_BH


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_step_is_looked_at_under_the_autocast_around_its_forward(door: Any) -> None:
    run = door(NormedReader())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = run(sequence(12))[0]
        rows.float().square().mean().backward()
    assert not [str(each.message) for each in said if issubclass(each.category, reroll.RerollWarning)]
