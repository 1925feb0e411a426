"""Thin tapes, which a budget asks for: gradients, buffers and random numbers are eager's, whatever is repeated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from deep_networks import DEEP, WIDTH
from simulation import simulating
from training_step import assert_alike, trained


class Attending(nn.Module):
    """A block of a transformer with dropout."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.p = nn.LayerNorm(width), nn.LayerNorm(width), p
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BSC)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSC = x_BSC + F.dropout(self.back(seen), self.p, self.training)
        y_BSC: Tensor = self.down(F.gelu(self.up(self.norm2(x_BSC))))
        return x_BSC + y_BSC


class Residual(nn.Module):
    """A block of a ResNet: its backward decides by what relu gave, and its batch norms count."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x_BCXY: Tensor) -> Tensor:
        y_BCXY = F.relu(self.norm1(self.first(x_BCXY)))
        return F.relu(x_BCXY + self.norm2(self.second(y_BCXY)))


class Gated(nn.Module):
    """A gated block, of whose product one half decides and the other does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x_BC: Tensor) -> Tensor:
        a, b = self.up(x_BC).chunk(2, -1)
        y_BC: Tensor = self.down(F.leaky_relu(a) * b)
        return x_BC + y_BC


def transformer(p: float) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Attending(16, p) for _ in range(8))), torch.randn(2, 96, 16)


def resnet() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Residual(4) for _ in range(8))), torch.randn(2, 4, 12, 12)


def gated() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Gated(16) for _ in range(8))), torch.randn(128, 16)


NETWORKS = {"transformer": lambda: transformer(0.0), "with dropout": lambda: transformer(0.3), "ResNet": resnet}


def compiled(model: nn.Module, budget: float, **options: Any) -> Any:
    torch._dynamo.reset()
    asked: dict[str, Any] = {"memory_budget": budget, "segment": 1, **options}
    return torch.compile(model, backend="reroll", options=asked)


@pytest.mark.variants(4)
@pytest.mark.parametrize("budget", [0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("name", NETWORKS)
def test_thin_tapes_train_as_eager_does(name: str, budget: float) -> None:
    torch.manual_seed(0)
    plain, x = NETWORKS[name]()
    plain, x = plain.double(), x.double()
    model = copy.deepcopy(plain)
    run = compiled(model, budget, lowering="eager", verify=True)
    assert_alike(trained(run, model, x), trained(plain, plain, x), 1e-12)


@pytest.mark.parametrize("make", [gated, lambda: transformer(0.0)], ids=["gated", "transformer"])
@pytest.mark.parametrize("options", [{}, {"remote": "disk"}], ids=["local", "disk"])
def test_a_budget_is_met_where_halves_share_memory_and_carries_may_move(make: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, x = make()
    plain, x = plain.double(), x.double()
    model = copy.deepcopy(plain)
    assert_alike(trained(compiled(model, 0.7, lowering="eager", **options), model, x), trained(plain, plain, x), 1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_budget_is_met_by_thin_tapes(name: str) -> None:
    """Some budget between those that keep all and those that run blocks again is."""
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    reports = [reroll.explain(compiled(model, part, lowering="eager"), x) for part in (0.7, 0.8, 0.9)]
    thin = [report for report in reports if report.loops[0].choice.thin]
    assert thin
    for report in thin:
        costs = report.loops[0].costs
        assert costs is not None
        assert all(each.thin_backward > 0 for each in costs.segments.values())
        assert "thin: True" in str(report.loops[0].program)
        assert "thin tapes of" in report.loops[0].choice.describe()


@pytest.mark.variants(4)
@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("budget", [0.6, 0.9])
@pytest.mark.parametrize("name", DEEP)
def test_all_kinds_of_blocks_keep_to_eager(name: str, budget: float) -> None:
    torch.manual_seed(0)
    make, _ = DEEP[name]
    plain, x_BC = make().double(), torch.randn(5, WIDTH).double()
    model = copy.deepcopy(plain)
    try:
        found = trained(compiled(model, budget, lowering="eager"), model, x_BC)
    except Exception as error:
        if "BudgetError" in str(error) or "below the least" in str(error):
            pytest.skip("the loop is too small a part for this budget")
        raise
    assert_alike(found, trained(plain, plain, x_BC), 1e-12)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "name", [*(pytest.param(each, marks=pytest.mark.campaign) for each in ("transformer", "with dropout")), "ResNet"]
)
def test_inductor_repeats_what_thin_tapes_leave_out(name: str) -> None:
    torch.manual_seed(0)
    plain, x = transformer(0.0) if name == "with dropout" else NETWORKS[name]()  # inductor draws other numbers
    model, twin = copy.deepcopy(plain), copy.deepcopy(plain)
    run, whole = compiled(model, 0.9), compiled(twin, 1.0)
    found = trained(run, model, x)[:-1]
    assert_alike(found, trained(whole, twin, x)[:-1], 1e-5)  # the same kernels
    assert_alike(found, trained(plain, plain, x)[:-1], 1e-3)
    assert reroll.explain(run, x).loops[0].choice.thin


def test_a_thin_tape_is_reversed_twice() -> None:
    torch.manual_seed(0)
    model, x = transformer(0.3)
    loss = compiled(model, 0.85, lowering="eager")(x).square().mean()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=keep) for keep in (True, False))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("behind", [True, False], ids=["behind its launches", "waiting for launches"])
def test_a_device_behind_its_launches_has_thin_tapes_and_others_recordings(behind: bool) -> None:
    torch.manual_seed(0)
    plain, x = transformer(0.0)
    plain, x = plain.double(), x.double()
    with simulating(behind=behind) as device:
        model = copy.deepcopy(plain)
        run = compiled(model, 0.7, lowering="eager", verify=True)
        assert_alike(trained(run, model, x), trained(plain, plain, x), 1e-12)
        report = reroll.explain(run, x)
    assert bool(report.loops[0].choice.thin) is behind
    assert any("launched one by one" in note and "is behind them" in note for note in report.notes) is behind
    assert (device.recordings > 0) is not behind
