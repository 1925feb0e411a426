"""CUDA graphs: what kernels give that are launched one by one, and no recording that fails unseen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import Results, differences
from on_card import (
    DOORS,
    DOUBLE,
    NETWORKS,
    RECORDED,
    SEGMENTS,
    agree_up_to_rounding,
    agrees,
    sequence,
    trained,
    trained_both,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("schedule", RECORDED)
@pytest.mark.parametrize("name", ["lstm", "lif"])
def test_recordings_give_what_kernels_do(name: str, schedule: str, dtype: torch.dtype, card: torch.device) -> None:
    model, inputs = NETWORKS[name]().to(card, dtype), [sequence(card, 24, dtype) for _ in range(4)]
    recorded, launched = trained_both(model, inputs, RECORDED[schedule])
    agree_up_to_rounding(recorded, launched, dtype)
    if dtype is torch.float64:
        assert not differences(recorded, trained(model, model, inputs), DOUBLE)


@pytest.mark.inductor
def test_two_models_in_turn(card: torch.device) -> None:
    models = [NETWORKS[name]().double().to(card) for name in ("gru", "lif")]
    twins = [copy.deepcopy(model) for model in models]
    runs = [DOORS["compile"](twin, **{**SEGMENTS, **RECORDED["double"]}) for twin in twins]
    for steps in (24, 24, 30, 24):
        x_TBI = sequence(card, steps)
        losses = []
        for run in runs:  # both forwards before both backwards
            out = run(x_TBI)
            losses.append(sum(each.square().sum() for each in (out if isinstance(out, tuple) else (out,))))
        for each in losses:
            each.backward()
        for model, twin in zip(models, twins, strict=True):
            assert not differences(gradients(twin, twin, None), gradients(model, model, x_TBI), DOUBLE)


def gradients(run: Any, model: nn.Module, x_TBI: Tensor | None) -> Results:
    """The gradients of a call, or those that are there; they are taken away."""
    if x_TBI is not None:
        out = run(x_TBI)
        torch.stack([each.square().sum() for each in (out if isinstance(out, tuple) else (out,))]).sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.inductor
@pytest.mark.parametrize("schedule", RECORDED)
def test_calls_on_side_streams(schedule: str, real_card: torch.device) -> None:
    model = NETWORKS["lif"]().double().to(real_card)
    twin = copy.deepcopy(model)
    run = DOORS["compile"](twin, **{**SEGMENTS, **RECORDED[schedule]})
    inputs = [sequence(real_card, 24) for _ in range(6)]
    expected = [gradients(model, model, x_TBI) for x_TBI in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    for number, x_TBI in enumerate(inputs):
        stream = streams[number % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = gradients(run, twin, x_TBI)
        torch.cuda.current_stream().wait_stream(stream)
        assert not differences(found, expected[number], DOUBLE)


@pytest.mark.inductor
def test_lengths_share_recordings(card: torch.device) -> None:
    model = NETWORKS["gru"]().double().to(card)
    options = {**SEGMENTS, "schedule": "standard", "chunk": 6}
    given = [(sequence(card, steps),) for steps in (12, 21, 30, 21)]
    agrees(model, lambda twin: DOORS["compile"](twin, **options), given)
