"""Blocks over depth beside what people train them with: each case trains as eager does, and the blocks are rolled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

import reroll
from deep_networks import WIDTH, Stack, layers
from trained import reversals

STEPS = 3
OPTIONS: dict[str, Any] = {"lowering": "eager", "schedule": "standard"}
Train = Callable[[Any, nn.Module], None]


class Checkpointed(Stack):
    """Blocks that torch's checkpoint runs again."""

    reentrant = False

    def forward(self, x_BC: Tensor) -> Any:
        x_BC = self.first(x_BC)
        for block in self.blocks:
            x_BC = checkpoint(block, x_BC, use_reentrant=self.reentrant)
        return self.last(x_BC)


class Reentrant(Checkpointed):
    """The same by its old way, which needs an input with a gradient."""

    reentrant = True


def batch(seed: int) -> Tensor:
    """Inputs of a training step."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_autocast(run: Any, model: nn.Module) -> None:
    """Training in bfloat16."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_scaler(run: Any, model: nn.Module) -> None:
    """Training with a gradient scaler."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu")
    for step in range(STEPS):
        scaler.scale(run(batch(step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def by_accumulation(run: Any, model: nn.Module) -> None:
    """Gradients of several batches of other sizes, added up."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        (run(batch(step)).square().mean() / STEPS).backward()
    run(batch(9)[:3]).square().mean().backward()
    optimizer.step()


CASES: dict[str, tuple[type[Stack], Train]] = {
    "autocast": (Stack, by_autocast),
    "GradScaler": (Stack, by_scaler),
    "accumulation": (Stack, by_accumulation),
    "torch.utils.checkpoint": (Checkpointed, by_accumulation),
    "reentrant checkpoint": (Reentrant, by_accumulation),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_trained_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    kind, train = CASES[name]
    model = kind(*layers(6))
    plain = copy.deepcopy(model)
    train(plain, plain)
    with reversals() as count:
        train(reroll.compile(model, **OPTIONS), model)
        assert count() >= STEPS
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_in_a_block_has_no_say_and_the_report_says_so() -> None:
    torch.manual_seed(0)
    rows = {}
    for kind in (Stack, Checkpointed):
        report = reroll.explain(reroll.compile(kind(*layers(6)), **OPTIONS), batch(0))
        rows[kind] = (report.predicted_peak, "torch.utils.checkpoint in a block has no say" in str(report))
    assert rows[Stack][0] == rows[Checkpointed][0]
    assert [told for _, told in rows.values()] == [False, True]


def test_blocks_that_are_compiled_already_are_rolled() -> None:
    torch.manual_seed(0)
    model = Stack(*layers(6))
    plain = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with reversals() as count:
        by_accumulation(reroll.compile(model, **OPTIONS), model)
        assert count() == STEPS + 1
    by_accumulation(plain, plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def llama(adapted: bool) -> Any:
    """LLaMA of transformers; ``adapted``: frozen, with adapters of low rank by peft."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 6}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    return model


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("kind", ["plain", "adapters of peft", "gradient checkpointing"])
def test_llama_is_trained_as_in_eager(kind: str) -> None:
    model = llama(kind == "adapters of peft")
    plain = copy.deepcopy(model)
    if kind == "gradient checkpointing":
        model.gradient_checkpointing_enable()
    text = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    call = partial(reroll.compile(model, **OPTIONS), input_ids=text, labels=text, use_cache=False)
    with reversals() as count:
        call().loss.backward()
        assert count() == 1
    plain(input_ids=text, labels=text, use_cache=False).loss.backward()
    trained = [each for each in plain.parameters() if each.requires_grad]
    assert len(trained) == (24 if kind == "adapters of peft" else 57)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:reroll found no recurrence")
def test_a_checkpoint_that_torch_runs_may_change_buffers() -> None:
    class Normed(nn.Module):
        """A layer whose batch norm, shared with another call, counts its batches."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def inner(self, x_BC: Tensor) -> Tensor:
            y_BC: Tensor = self.norm(self.layer(x_BC))
            return y_BC.tanh()

        def forward(self, x_BC: Tensor) -> Tensor:
            return self.inner(checkpoint(self.inner, x_BC, use_reentrant=False))

    torch.manual_seed(0)
    model = Normed().double()
    run = reroll.compile(model, **OPTIONS)
    assert reroll.check(run, batch(0).double().requires_grad_(), measure=False).equal
