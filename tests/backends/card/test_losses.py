"""Losses on a card: in the loop, beside the model, and with gradients that are cut every k steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from on_card import DOORS, B, H, I, agrees, sequence
from reroll.planning.options import Lowering

LOWERINGS = pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


class Layered(nn.Module):
    """A recurrent layer of torch's, of which all outputs are read."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(I, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        y_TBH: Tensor = self.rnn(x_TBI)[0]
        return y_TBH


class Summed(nn.Module):
    """A loss in the loop. ``every``: the state is detached before steps k, 2 k, ..."""

    def __init__(self, every: int = 0) -> None:
        super().__init__()
        self.cell, self.out, self.every = nn.GRUCell(I, H), nn.Linear(H, I), every

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, loss = x_TBI.new_zeros(x_TBI.shape[1], H), x_TBI.new_zeros(())
        for t in range(x_TBI.shape[0]):
            if self.every and t and t % self.every == 0:
                h_BH = h_BH.detach()
            h_BH = self.cell(x_TBI[t], h_BH)
            loss = loss + F.mse_loss(self.out(h_BH), x_TBI[t])
        return loss


@LOWERINGS
def test_a_loss_in_the_loop(lowering: str, card: torch.device) -> None:
    options = {"lowering": lowering, "segment": 2, "schedule": "standard"}
    agrees(Summed().double().to(card), lambda twin: DOORS["compile"](twin, **options), [(sequence(card, 24),)])


@LOWERINGS
def test_a_loss_beside_the_model(lowering: Lowering, card: torch.device) -> None:
    model = Layered().double().to(card)
    twin = copy.deepcopy(model)
    train = reroll.compile(twin, loss=F.mse_loss, lowering=lowering, schedule="standard", segment=2)
    for steps in (20, 33):
        x_TBI, wanted_TBH = sequence(card, steps), torch.randn(steps, B, H, dtype=torch.float64).to(card)
        for loss in (F.mse_loss(model(x_TBI), wanted_TBH), train(x_TBI, target=wanted_TBH)):
            loss.backward()
        for found, expected in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


@LOWERINGS
def test_truncated_gradients(lowering: str, card: torch.device) -> None:
    cut = Summed(every=5).double().to(card)

    def truncated(twin: nn.Module) -> Any:
        twin.every = 0  # type: ignore[assignment]
        return DOORS["compile"](twin, lowering=lowering, truncate=5)

    agrees(cut, truncated, [(sequence(card, steps),) for steps in (24, 37)])
