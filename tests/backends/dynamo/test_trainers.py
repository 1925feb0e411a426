"""Training loops of others: compiled optimizers and losses, Lightning, and the Trainer of transformers.

Each trains a small network as plain eager does. ``make`` installs the libraries (the extra ``trainers``).
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import reroll
from trained import DOORS, PLAN, WIDTH, GatedReader, reversals, through_backend, through_front, trained_alike

STEPS = 4
BATCH = 4


def square(out: Tensor) -> Tensor:
    """A loss."""
    return out.square().mean()


def trained(run: Any, model: nn.Module, compiled: Callable[[Any], Any], loss: Any = square) -> None:
    """Train some steps, with an optimizer's step and a loss that ``compiled`` compiles."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step, loss = compiled(optimizer.step), compiled(loss)
    for steps in (9, 14, 9, 14):
        optimizer.zero_grad()
        loss(run(torch.randn(steps, 4, WIDTH))).backward()
        step()


def by_aot(function: Any) -> Any:
    """What torch compiles with its own kernels."""
    return torch.compile(function, backend="aot_eager")


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_compiled_optimizer_and_loss(door: Any) -> None:
    start = GatedReader()
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    with reversals() as count:
        trained(door(model), model, by_aot)
        assert count() == STEPS
    trained(plain, plain, lambda function: function)
    trained_alike(model, plain, start, 1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "reroll"])
@pytest.mark.filterwarnings("ignore:reroll found no recurrence")
def test_compiled_function_around_a_compiled_model(backend: str) -> None:
    start = GatedReader()
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    run = through_front(model)

    def loss(x_TBI: Tensor) -> Tensor:
        return square(run(2 * x_TBI)) * 3

    options = {"options": {"lowering": "eager"}} if backend == "reroll" else {}
    with reversals() as count:
        trained(torch.compile(loss, backend=backend, **options), model, lambda function: function, lambda value: value)  # type: ignore[call-overload]
        assert count() == STEPS
    trained(lambda x_TBI: square(plain(2 * x_TBI)) * 3, plain, lambda function: function, lambda value: value)
    trained_alike(model, plain, start, 1e-4)


def test_a_compiled_model_is_no_part_of_one_graph() -> None:
    run = through_front(GatedReader())
    whole = torch.compile(lambda x_TBI: square(run(x_TBI)), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        whole(torch.randn(9, 4, WIDTH))


def sequences() -> tuple[Tensor, Tensor]:
    """Sequences [batch, time, inputs], and a class for each."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(24, 12, WIDTH, generator=generator), torch.randint(3, (24,), generator=generator)


def by_lightning(wrap: Callable[[Any], Any], network: Any, folder: Path, **settings: Any) -> None:
    """Train a network inside of a LightningModule that ``wrap`` may compile."""
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Lit(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return cross_entropy(self.network(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    silent = {**quiet, "enable_checkpointing": False, "default_root_dir": folder}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=STEPS, **silent, **settings)
    trainer.fit(wrap(Lit()), torch.utils.data.DataLoader(TensorDataset(*sequences()), batch_size=BATCH))


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "compile": (lambda lit: lit, through_front),
    "backend": (lambda lit: lit, through_backend),
    "backend around": (through_backend, lambda network: network),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"precision": "bf16-mixed"},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 2},
}


@pytest.mark.variants(4)
@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("wrap", "compiled"), WAYS.values(), ids=WAYS)
def test_lightning(wrap: Any, compiled: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    start = GatedReader(batch_first=True)
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    with reversals() as count:
        by_lightning(wrap, compiled(model), tmp_path, **settings)
        assert count() == STEPS * settings.get("accumulate_grad_batches", 1)
    by_lightning(lambda lit: lit, plain, tmp_path, **settings)
    trained_alike(model, plain, start, 1e-3)


def test_lightning_wants_the_network_compiled_and_not_its_module(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        by_lightning(through_front, GatedReader(batch_first=True), tmp_path)


class Classifier(nn.Module):
    """What the Trainer of transformers trains: a model that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GatedReader(batch_first=True)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(x)
        return {"loss": cross_entropy(logits.float(), labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences by the names of the classifier's arguments."""

    def __len__(self) -> int:
        return len(sequences()[0])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        x_NTI, y_N = sequences()
        return {"x": x_NTI[row], "labels": y_N[row]}


def by_trainer(model: nn.Module, folder: Path, **settings: Any) -> None:
    """Train by the Trainer of transformers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    with mock.patch.dict(os.environ):  # where arguments leave the name of a backend
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=1e-2, **quiet, **settings
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=Rows()).train()


def compiled_in_place(model: Classifier) -> None:
    """The whole model, by the backend."""
    model.compile(backend="reroll", options=PLAN)


def compiled_part(model: Classifier) -> None:
    """The part with the loop, by reroll.compile."""
    model.network = through_front(model.network)


TRAINER_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16, accumulated": {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.05},
}


@pytest.mark.parametrize("settings", TRAINER_SETTINGS.values(), ids=TRAINER_SETTINGS)
@pytest.mark.parametrize("change", [compiled_in_place, compiled_part])
def test_trainer_of_transformers(
    change: Callable[[Classifier], None], settings: dict[str, Any], tmp_path: Path
) -> None:
    start = Classifier()
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    change(model)
    with reversals() as count:
        by_trainer(model, tmp_path, **settings)
        assert count() == STEPS * settings.get("gradient_accumulation_steps", 1)
    by_trainer(plain, tmp_path, **settings)
    trained_alike(model, plain, start, 1e-3 if not settings else 0.05)


def test_trainer_that_compiles_around_a_compiled_part(tmp_path: Path) -> None:
    start = Classifier()
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    compiled_part(model)
    with reversals() as count:
        by_trainer(model, tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
        assert count() == STEPS
    by_trainer(plain, tmp_path)
    trained_alike(model, plain, start, 1e-3)


@pytest.mark.inductor
def test_accelerate_takes_the_name_once_it_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = pytest.importorskip("accelerate.utils").DynamoBackend
    asked = {"torch_compile": True, "torch_compile_backend": "reroll"}
    monkeypatch.setattr(backends, "_missing_", backends._missing_)
    with pytest.raises(ValueError, match="'REROLL' is not a valid DynamoBackend"):
        by_trainer(Classifier(), tmp_path, **asked)
    reroll.register_with_accelerate()
    reroll.register_with_accelerate()
    start = Classifier()
    model, plain = copy.deepcopy(start), copy.deepcopy(start)
    with reversals() as count:
        by_trainer(model, tmp_path, **asked)
        assert count() == STEPS
    with reversals() as count:
        by_trainer(plain, tmp_path)
        assert count() == 0
    trained_alike(model, plain, start, 1e-3)
    with pytest.raises(ValueError, match="'NONSENSE' is not a valid DynamoBackend"):
        backends("NONSENSE")
    assert backends("INDUCTOR") is backends.INDUCTOR
