"""Random draws whose rate is another one at each step: rolled, with the random numbers of eager."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from reroll.capture.steps.numbers import BERNOULLI
from reroll.errors import RerollWarning

WIDTH, BLOCKS = 6, 7
OPTIONS: dict[str, Any] = {"lowering": "eager"}
Drop = Callable[[Tensor, float], Tensor]


def drop_path(x_BTC: Tensor, p: float) -> Tensor:
    """Stochastic depth, as timm writes it."""
    mask_B11 = x_BTC.new_empty((x_BTC.shape[0], 1, 1)).bernoulli_(1 - p)
    mask_B11.div_(1 - p)
    return x_BTC * mask_B11


def row_noise(x_BTC: Tensor, p: float) -> Tensor:
    """The same, as torchvision writes it."""
    noise_B11 = torch.empty([x_BTC.shape[0], 1, 1], dtype=x_BTC.dtype, device=x_BTC.device).bernoulli_(1.0 - p)
    return x_BTC * noise_B11.div_(1.0 - p)


def floored(x_BTC: Tensor, p: float) -> Tensor:
    """The same, as transformers writes it."""
    mask_B11 = 1 - p + torch.rand((x_BTC.shape[0], 1, 1), dtype=x_BTC.dtype)
    return x_BTC.div(1 - p) * mask_B11.floor_()


def twice(x_BTC: Tensor, p: float) -> Tensor:
    """Two draws, one with a rate of its own, in another order in memory."""
    return F.dropout(x_BTC.transpose(1, 2), p).transpose(1, 2) + F.dropout(drop_path(x_BTC, p / 2), 0.25)


DROPS: dict[str, Drop] = {
    "timm": drop_path,
    "torchvision": row_noise,
    "transformers": floored,
    "dropout": F.dropout,
    "torch.dropout": lambda x_BTC, p: torch.dropout(x_BTC, p, train=True),
    "several": twice,
}


class Deep(nn.Module):
    """Blocks that drop more and more of what they add."""

    def __init__(self, drop: Drop, rates: list[float] | None = None) -> None:
        super().__init__()
        self.drop = drop
        self.rates = rates or torch.linspace(0.05, 0.4, BLOCKS).tolist()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.rates)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.rates)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = self.first(x_BTC)
        for norm, layer, rate in zip(self.norms, self.layers, self.rates, strict=True):
            added_BTC = torch.tanh(layer(norm(x_BTC)))
            x_BTC = x_BTC + (self.drop(added_BTC, rate) if self.training else added_BTC)
        return x_BTC


def checked(model: nn.Module, *inputs: Tensor, **options: Any) -> list[int]:
    """Compare with eager; the steps of each loop."""
    torch.manual_seed(0)
    run = torch.compile(model, backend="reroll", options=OPTIONS | options)
    reroll.check(run, *inputs, measure=False, strict=True)
    return [loop.recurrence.steps for loop in reroll.explain(run, *inputs).loops]


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", DROPS)
def test_blocks_with_rates_of_their_own_are_rolled(name: str) -> None:
    assert checked(Deep(DROPS[name]).double(), torch.randn(5, 4, WIDTH).double()) == [BLOCKS]


@pytest.mark.parametrize("schedule", ["store_all", "revolve", "double"])
def test_blocks_that_run_again_draw_the_same(schedule: str) -> None:
    more = {"segment": 1, "verify": True, "schedule": schedule}
    assert checked(Deep(twice).double(), torch.randn(5, 4, WIDTH).double(), **more) == [BLOCKS]


def test_without_training_nothing_is_drawn() -> None:
    assert checked(Deep(drop_path).double().eval(), torch.randn(5, 4, WIDTH).double()) == [BLOCKS]


def test_a_rate_of_nothing_draws_nothing_and_stays_apart() -> None:
    """Eager draws no random numbers where a dropout's rate is 0 or 1."""
    rates = [0.0, *torch.linspace(0.1, 0.3, BLOCKS - 1).tolist(), 1.0]
    assert checked(Deep(F.dropout, rates).double(), torch.randn(5, 4, WIDTH).double()) == [BLOCKS - 1]


def test_rates_may_change_over_time() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.rates = [0.5 * 0.8**t for t in range(12)]

        def forward(self, x_TBC: Tensor) -> Tensor:
            h_BC = torch.zeros_like(x_TBC[0])
            for t, rate in enumerate(self.rates):
                h_BC = self.cell(F.dropout(x_TBC[t], rate), h_BC)
            return h_BC

    assert checked(Annealed().double(), torch.randn(12, 3, WIDTH).double()) == [12]


def test_updates_in_place_by_numbers_of_their_own_are_rolled() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

        def forward(self, x_BC: Tensor) -> Tensor:
            x_BC = self.first(x_BC)
            for n, layer in enumerate(self.layers, 1):
                added_BC = layer(x_BC)
                added_BC *= 1 / n
                added_BC.add_(0.1 * n).sub_(n)
                x_BC = x_BC + torch.tanh(added_BC)
            return x_BC

    assert checked(Scaled().double(), torch.randn(5, WIDTH).double()) == [BLOCKS]


@pytest.mark.inductor
def test_compiled_by_inductor_the_rates_are_kept() -> None:
    """Masks of a million entries have ones as often as each block's rate says, and gradients read the same masks."""
    rates = [0.1, 0.3, 0.5, 0.7]

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(()))
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in rates)

        def forward(self, x_N: Tensor) -> tuple[Tensor, ...]:
            found = [x_N * self.first]
            for scale, rate in zip(self.scales, rates, strict=True):
                found.append(F.dropout(found[-1].detach() + scale, rate))
            return tuple(found)

    model = Masks()
    run = torch.compile(model, backend="reroll", options={"schedule": "standard", "segment": 1})
    found = run(torch.zeros(1_000_000))
    assert [loop.recurrence.steps for loop in reroll.explain(run, torch.zeros(1_000_000)).loops] == [len(rates)]
    sum(each.mean() for each in found[1:]).backward()
    for scale, rate, (before, made) in zip(model.scales, rates, pairwise(found), strict=True):
        assert float((made == 0).double().mean()) == pytest.approx(rate, abs=2e-3)
        torch.testing.assert_close(made[made != 0], ((before + 1) / (1 - rate))[made != 0])
        expected = float((made != 0).double().mean()) / (1 - rate)
        assert float(scale.grad) == pytest.approx(expected, rel=1e-4)  # another mask is 5e-4 off and more


def test_the_operator_draws_what_torch_draws() -> None:
    for like in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.empty(0, 4), torch.randn(2, 3, 4, 5).double()):
        for rate in (0.0, 0.3, 1.0):
            torch.manual_seed(1)
            expected = torch.empty_like(like).bernoulli_(rate)
            rest = torch.rand(3)
            torch.manual_seed(1)
            found = BERNOULLI(like, torch.tensor(rate, dtype=torch.float64))
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()
            assert torch.equal(torch.rand(3), rest)


def test_draws_that_update_a_view_are_left() -> None:
    class Turned(Deep):
        def forward(self, x_BTC: Tensor) -> Tensor:
            for layer, rate in zip(self.layers, self.rates, strict=True):
                mask_BT = torch.zeros(x_BTC.shape[:2], dtype=x_BTC.dtype)
                mask_BT.t().bernoulli_(rate)
                x_BTC = x_BTC + torch.tanh(layer(x_BTC)) * mask_BT[..., None]
            return x_BTC

    with pytest.warns(RerollWarning, match="no recurrence"):
        assert checked(Turned(drop_path).double(), torch.randn(5, 4, WIDTH).double()) == []
