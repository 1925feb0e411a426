"""CUDA graphs: the same bits as kernels that are launched one by one, and no recording that fails unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import Results, differences
from card import DOORS, DOUBLE, NETWORKS, Looped, agrees, sequence

OPTIONS: dict[str, Any] = {"segment": 3, "lowering": "inductor"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "store_all": {"schedule": "store_all"},
    "standard": {"schedule": "standard", "chunk": 6},
    "double": {"schedule": "double", "chunk": 6, "slots": 2, "remote": "host"},
}
RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Looped(nn.GRUCell, p=0.3),
    "noise": lambda: Looped(nn.GRUCell, noise=0.5),
}

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


def trained(run: Any, model: nn.Module, inputs: Sequence[Tensor]) -> Results:
    """Outputs and gradients of every step of a training, and the weights behind it."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), Results()
    torch.manual_seed(3)
    for step, x_TBI in enumerate(inputs):
        optimizer.zero_grad()
        x_TBI = x_TBI.clone().requires_grad_()
        out = run(x_TBI)
        outputs = out if isinstance(out, tuple) else (out,)
        torch.stack([each.square().sum() for each in outputs]).sum().backward()
        named = [("input", x_TBI), *model.named_parameters()]
        found |= {f"{name} {step}": each.grad.clone() for name, each in named if each.grad is not None}
        found |= {f"output {n} {step}": each.detach().clone() for n, each in enumerate(outputs)}
        optimizer.step()
    return found | {name: each.detach().clone() for name, each in model.named_parameters()}


def both(model: nn.Module, inputs: Sequence[Tensor], options: dict[str, Any], door: str = "compile") -> list[Results]:
    """A training with recordings, and without."""
    found = []
    for recorded in (True, False):
        twin = copy.deepcopy(model)
        run = DOORS[door](twin, **{**OPTIONS, **options, "cuda_graphs": recorded})
        found.append(trained(run, twin, inputs))
    return found


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["lstm", "lif"])
def test_recordings_give_the_same_bits(name: str, schedule: str, dtype: torch.dtype, card: torch.device) -> None:
    model, inputs = NETWORKS[name]().to(card, dtype), [sequence(card, 24, dtype) for _ in range(4)]
    recorded, launched = both(model, inputs, SCHEDULES[schedule])
    assert not differences(recorded, launched, 0.0)
    if dtype is torch.float64:
        assert not differences(recorded, trained(model, model, inputs), DOUBLE)


@pytest.mark.inductor
@pytest.mark.parametrize("schedule", ["standard", "double"])
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_recordings_are_those_of_kernels(name: str, schedule: str, card: torch.device) -> None:
    model, inputs = RANDOM[name]().double().to(card), [sequence(card, 24) for _ in range(3)]
    recorded, launched = both(model, inputs, SCHEDULES[schedule])
    assert not differences(recorded, launched, 0.0)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_eagers(name: str, schedule: str, door: str, card: torch.device) -> None:
    model, inputs = RANDOM[name]().double().to(card), [sequence(card, 24) for _ in range(3)]
    recorded, launched = both(model, inputs, {**SCHEDULES[schedule], "lowering": "eager"}, door)
    assert not differences(recorded, launched, 0.0)
    assert not differences(recorded, trained(model, model, inputs), DOUBLE)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("name", RANDOM)
def test_a_backward_draws_what_its_forward_drew(name: str, lowering: str, card: torch.device) -> None:
    """Gradients are those of finite differences of the compiled model itself, at the same random numbers."""
    model, x_TBI = RANDOM[name]().double().to(card), sequence(card, 24)
    run = DOORS["compile"](model, **{**OPTIONS, **SCHEDULES["double"], "lowering": lowering})

    def loss(shift: float) -> Tensor:
        torch.manual_seed(5)
        rows, last = run((x_TBI + shift * direction).requires_grad_())
        total: Tensor = rows.square().sum() + last.sin().sum()
        return total

    direction = torch.randn_like(x_TBI)
    loss(0.0)  # recorded
    torch.manual_seed(5)
    given = x_TBI.clone().requires_grad_()
    rows, last = run(given)
    (rows.square().sum() + last.sin().sum()).backward()
    assert given.grad is not None
    step = 1e-5
    expected = (loss(step) - loss(-step)) / (2 * step)
    torch.testing.assert_close((given.grad * direction).sum(), expected.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.inductor
def test_two_models_in_turn(card: torch.device) -> None:
    models = [NETWORKS[name]().double().to(card) for name in ("gru", "lif")]
    twins = [copy.deepcopy(model) for model in models]
    runs = [DOORS["compile"](twin, **{**OPTIONS, **SCHEDULES["double"]}) for twin in twins]
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
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_calls_on_side_streams(schedule: str, real_card: torch.device) -> None:
    model = NETWORKS["lif"]().double().to(real_card)
    twin = copy.deepcopy(model)
    run = DOORS["compile"](twin, **{**OPTIONS, **SCHEDULES[schedule]})
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
    options = {**OPTIONS, "schedule": "standard", "chunk": 6}
    given = [(sequence(card, steps),) for steps in (12, 21, 30, 21)]
    agrees(model, lambda twin: DOORS["compile"](twin, **options), given)
