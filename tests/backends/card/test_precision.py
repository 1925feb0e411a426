"""Autocast and scaled gradients on a card: those of eager under the same autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from on_card import DOORS, NETWORKS, sequence
from trained import distance

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=("bfloat16", "float16"))
LOWERINGS = pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
TOLERANCE = 2e-2  # of the norm of all gradients together

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


def loss_of(run: Callable[..., Any], x_TBI: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x_TBI.device.type, dtype=dtype):
        rows, last = run(x_TBI)
    loss: Tensor = rows.float().square().mean() + last.float().square().mean()
    return loss


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(bool(grad.isfinite().all()) for grad in found)
    return [grad.clone() for grad in found]


@HALVES
@LOWERINGS
@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
def test_autocast(name: str, lowering: str, dtype: torch.dtype, card: torch.device) -> None:
    model = NETWORKS[name]().to(card)
    twin = copy.deepcopy(model)
    run = DOORS["compile"](twin, lowering=lowering, segment=2, schedule="double", chunk=8, slots=2, remote="host")
    for steps in (24, 15):
        x_TBI = sequence(card, steps, torch.float32)
        losses = [loss_of(call, x_TBI, dtype) for call in (run, model)]
        for loss in losses:
            loss.backward()
        assert distance(losses[:1], losses[1:]) < TOLERANCE
        assert distance(gradients(twin), gradients(model)) < TOLERANCE


def scaled_steps(run: Callable[..., Any], model: nn.Module, inputs: list[Tensor]) -> list[float]:
    """Train with a scale that overflows float16 in the first step; gives the scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(inputs[0].device.type, init_scale=2.0**30, growth_interval=2, backoff_factor=2.0**-14)
    scales = []
    for x_TBI in inputs:
        optimizer.zero_grad()
        scaler.scale(loss_of(run, x_TBI, torch.float16)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
    return scales


@LOWERINGS
def test_scaled_steps_are_skipped_as_in_eager(lowering: str, card: torch.device) -> None:
    start = NETWORKS["gru"]().to(card)
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    inputs = [sequence(card, steps, torch.float32) for steps in (12, 15, 12, 12)]
    run = DOORS["compile"](model, lowering=lowering, segment=2, schedule="standard", chunk=4)
    scales = scaled_steps(run, model, inputs)
    assert scales == scaled_steps(plain, plain, inputs)
    assert scales[1] < scales[0]
    ways = [
        [b.detach() - a.detach() for a, b in zip(start.parameters(), each.parameters(), strict=True)]
        for each in (model, plain)
    ]
    assert distance(ways[0], ways[1]) < TOLERANCE
