"""Predicted peaks of deep networks are the measured ones, to the byte, where no operation has memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

PLANS: dict[str, dict[str, Any]] = {
    "standard": {"schedule": "standard"},
    "store_all": {"schedule": "store_all"},
    "a third": {"memory_budget": 0.33},
    "a half": {"memory_budget": 0.5},
}


class Block(nn.Module):
    """A block of a transformer, without dropout: its attention draws no random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.back = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_BSC)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSC = x_BSC + self.back(seen)
        y_BSC: Tensor = self.down(F.gelu(self.up(x_BSC)))
        return x_BSC + y_BSC


class Reader(nn.Module):
    """Words, ten blocks, and a loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(Block(width) for _ in range(10))

    def forward(self, words_BS: Tensor) -> Tensor:
        x_BSC = self.words(words_BS)
        for block in self.blocks:
            x_BSC = block(x_BSC)
        return F.cross_entropy(self.out(x_BSC).flatten(0, 1), words_BS.roll(-1, 1).flatten())


class Joined(nn.Module):
    """Convolutions down and up, where each on the way up also reads what one on the way down gave."""

    def __init__(self, width: int = 12, blocks: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(blocks))
        self.join = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(blocks))

    def forward(self, x_BCXY: Tensor) -> Tensor:
        x_BCXY, kept = self.first(x_BCXY), []
        for layer in self.down:
            x_BCXY = F.gelu(layer(x_BCXY)) + x_BCXY
            kept.append(x_BCXY)
        for layer, skipped in zip(self.join, reversed(kept), strict=True):
            x_BCXY = F.gelu(layer(torch.cat([x_BCXY, skipped], 1)))
        return x_BCXY.square().mean()


def peaks(model: nn.Module, given: Tensor, options: dict[str, Any]) -> tuple[int, int]:
    """The predicted peak of a training step, and the measured one."""
    compiled = reroll.compile(model, **options)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(given).backward()

    step()
    model.zero_grad(set_to_none=True)
    return reroll.explain(compiled, given).predicted_peak, reroll.measure(step, exclude=[model]).local_peak


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_predicted_peak_is_the_measured_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    predicted, measured = peaks(Reader(), torch.randint(0, 32, (4, 24)), options)
    assert predicted == measured


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("budget", [0.7, 0.9])
def test_skips_between_two_loops_keep_to_a_budget(budget: float) -> None:
    torch.manual_seed(0)
    model, x_BCXY = Joined(), torch.randn(4, 3, 32, 32)
    whole = reroll.measure(lambda: model(x_BCXY).backward(), exclude=[model]).local_peak
    predicted, measured = peaks(model, x_BCXY, {"memory_budget": int(budget * whole)})
    assert measured <= int(budget * whole)
    assert 0.97 < predicted / measured < 1.1


class Counted(nn.Module):
    """A loss of a small readout alone, so that nobody gives a gradient of the large last state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, sum_BO = x_TBI.new_zeros(x_TBI.shape[1], 64), x_TBI.new_zeros(x_TBI.shape[1], 2)
        for x_BI in x_TBI:
            h_BH = torch.tanh(self.inner(h_BH) + x_BI)
            sum_BO = sum_BO + self.out(h_BH)
        return sum_BO.square().mean()


def test_gradients_of_last_states_that_nobody_gives_are_not_counted() -> None:
    state = 128 * 64 * 4
    options = {"lowering": "eager", "schedule": "revolve", "slots": 3, "segment": 4}
    predicted, measured = peaks(Counted(), torch.randn(64, 128, 64), options)
    assert 0 <= predicted - measured < state / 2


class Bent(nn.Module):
    """A step whose last result is both what its backward reads and what it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def step(self, x_BI: Tensor, h_BH: Tensor) -> Tensor:
        return torch.tanh(self.inner(h_BH) + x_BI)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1:])
        for x_BI in x_TBI:
            h_BH = self.step(x_BI, h_BH)
        return h_BH.sum()


class Written(Bent):
    """The same with a step that writes inside: it has to be made functional."""

    def step(self, x_BI: Tensor, h_BH: Tensor) -> Tensor:
        return torch.tanh(self.inner(h_BH).add_(x_BI))


@pytest.mark.parametrize("network", [Bent, Written])
@pytest.mark.parametrize(
    "options",
    [{"schedule": "store_all"}, {"schedule": "standard"}, {"schedule": "revolve", "slots": 3}, {"memory_budget": 0.6}],
    ids=str,
)
def test_what_a_tape_hands_on_is_held_once(options: dict[str, Any], network: type[Bent]) -> None:
    model, x_TBI = network(), torch.randn(24, 256, 32)
    carry = x_TBI[0].nbytes
    predicted, measured = peaks(model, x_TBI, {"lowering": "eager", "segment": 1, **options})
    assert 0 <= predicted - measured <= 2.1 * carry
    plain = reroll.measure(lambda: model(x_TBI).backward(), exclude=[model]).local_peak
    assert measured < plain + 2 * carry  # a copy of each carry would be 23 more
