"""Every schedule on a card, through both doors: outputs and gradients are eager's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import reroll
from on_card import DOORS, NETWORKS, agrees, sequence
from reroll.schedules.named import find, schedule_names

SCHEDULES: dict[str, dict[str, Any]] = {
    "store_all": {},
    "standard": {"chunk": 4},
    "every_k": {"chunk": 4},
    "full": {},
    "remote": {"chunk": 4, "remote": "host"},
    "hierarchical": {"chunk": 8, "slots": 2, "remote": "host"},
    "double": {"chunk": 8, "slots": 2, "remote": "host"},
    "double_merged": {"chunk": 8, "slots": 2, "remote": "host"},
    "revolve": {"slots": 3},
    "hrevolve": {"slots": 3, "remote": "host"},
}
MOVING = [name for name, options in SCHEDULES.items() if "remote" in options]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


def options_of(schedule: str, **others: Any) -> dict[str, Any]:
    return {"lowering": "eager", "segment": 2, "verify": True, "schedule": schedule, **SCHEDULES[schedule], **others}


def test_no_schedule_is_left_out() -> None:
    ours = {name for name in schedule_names() if find(name).build.__module__ == "reroll.schedules.named"}
    assert set(SCHEDULES) == ours


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_compilation_serves_every_length(name: str, schedule: str, card: torch.device) -> None:
    model, options = NETWORKS[name]().double().to(card), options_of(schedule)
    lengths = [(sequence(card, steps),) for steps in (24, 1, 5, 37)]
    agrees(model, lambda twin: DOORS["compile"](twin, **options), lengths)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["lstm", "lif"])
def test_the_backend(name: str, schedule: str, card: torch.device) -> None:
    model, options = NETWORKS[name]().double().to(card), options_of(schedule)
    agrees(model, lambda twin: DOORS["backend"](twin, **options), [(sequence(card, 24),)] * 2)


@pytest.mark.parametrize("steps", [1, 5, 37])
@pytest.mark.parametrize("name", NETWORKS)
def test_lengths_of_the_backend(name: str, steps: int, card: torch.device) -> None:
    model, options = NETWORKS[name]().double().to(card), options_of("double")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reroll.RerollWarning)  # one step is no loop
        agrees(model, lambda twin: DOORS["backend"](twin, **options), [(sequence(card, steps),)])


@pytest.mark.parametrize("schedule", MOVING)
@pytest.mark.parametrize("name", ["lstm", "lif"])
def test_carries_go_to_the_disk(name: str, schedule: str, card: torch.device) -> None:
    model, options = NETWORKS[name]().double().to(card), options_of(schedule, remote="disk")
    agrees(model, lambda twin: DOORS["compile"](twin, **options), [(sequence(card, steps),) for steps in (24, 37)])


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, "double") for name in NETWORKS), *(("lif", other) for other in ("store_all", "standard", "revolve"))],
)
def test_kernels_of_inductor(name: str, schedule: str, card: torch.device) -> None:
    model, options = NETWORKS[name]().double().to(card), options_of(schedule, lowering="inductor")
    agrees(model, lambda twin: DOORS["compile"](twin, **options), [(sequence(card, steps),) for steps in (24, 5, 37)])


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["gru", "lif"])
def test_kernels_of_inductor_by_the_backend(name: str, card: torch.device) -> None:
    model, options = NETWORKS[name]().double().to(card), options_of("double", lowering="inductor", remote="disk")
    agrees(model, lambda twin: DOORS["backend"](twin, **options), [(sequence(card, 24),)] * 2)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
def test_single_precision_and_what_is_chosen_without_options(name: str, card: torch.device) -> None:
    model = NETWORKS[name]().to(card)
    given = [(sequence(card, steps, torch.float32),) for steps in (37, 24)]
    agrees(model, DOORS["compile"], given, 1e-4)
