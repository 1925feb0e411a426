"""What lies before an operand of a loop is reached by a backward only where the loss depends on that operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll

T, B, H = 9, 2, 3


class Adding(torch.autograd.Function):
    """Nothing, with a gradient that is more than comes in, even if nothing does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.5


def hooked(value: Tensor) -> Tensor:
    """The same value, with a hook."""
    value = value * 1.0
    if value.requires_grad:
        value.register_hook(lambda grad: grad + 0.5)
    return value


class Heads(nn.Module):
    """Two states of one loop, of which the second depends on one weight alone, and a second loop on the first."""

    def __init__(self, before: Callable[[Tensor], Tensor], place: str) -> None:
        super().__init__()
        self.before, self.place = before, place
        self.first, self.w, self.v = (nn.Parameter(torch.rand(*size) * 0.4) for size in ((H,), (H, H), (H,)))

    def at(self, place: str, value: Tensor) -> Tensor:
        return self.before(value) if place == self.place else value

    def forward(self, x_TBH: Tensor) -> tuple[Tensor, ...]:
        h_BH = self.at("state", self.first.expand(B, H))
        w_HH, x_TBH = self.at("weight", self.w), self.at("sequence", x_TBH)
        k_BH, hs, ks, ls = x_TBH.new_zeros(B, H), [], [], []
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(h_BH @ w_HH + x_TBH[t])
            k_BH = 0.5 * k_BH + self.v
            hs.append(h_BH)
            ks.append(k_BH)
        between_TBH, l_BH = self.at("between", torch.stack(hs)), x_TBH.new_zeros(B, H)
        m_BH = x_TBH.new_zeros(B, H)
        for t in range(x_TBH.shape[0]):
            l_BH = torch.tanh(0.3 * l_BH + between_TBH[t])
            m_BH = m_BH * 0.9 + self.v
            ls.append(m_BH)
        return torch.stack(hs), torch.stack(ks), l_BH, torch.stack(ls)


def gradients(model: nn.Module, run: Callable[..., Any], used: tuple[int, ...], leaf_hook: bool = False) -> list[Any]:
    """Of a loss of some results: for all parameters and the input; None, too."""
    torch.manual_seed(1)
    x_TBH = torch.randn(T, B, H, requires_grad=True)
    handles = [each.register_hook(lambda grad: 2 * grad) for each in (*model.parameters(), x_TBH) if leaf_hook]
    results = run(x_TBH)
    sum(results[number].square().sum() for number in used).backward()
    found = [each.grad for each in (*model.parameters(), x_TBH)]
    for each in (*handles,):
        each.remove()
    model.zero_grad()
    return found


def same(found: list[Any], expected: list[Any]) -> None:
    """Equal gradients, None where there is none."""
    for mine, plain in zip(found, expected, strict=True):
        assert (mine is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def both(door: str, model: nn.Module, **how: Any) -> Callable[..., Any]:
    how = {"lowering": "eager", **how}
    if door == "front":
        run: Callable[..., Any] = reroll.compile(model, time_dim=0, **how)
        return run
    return torch.compile(model, backend="reroll", options=how)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("place", ["state", "weight", "sequence", "between", "none"])
@pytest.mark.parametrize("before", [Adding.apply, hooked])
@pytest.mark.parametrize("door", ["front", "backend"])
def test_what_a_loss_does_not_depend_on_is_not_run(door: str, before: Any, place: str) -> None:
    """Neither a function of the user's, nor a hook, on a value before the loop or on a leaf."""
    model = Heads(before, place)
    run = both(door, model)
    for used in ((1,), (3,), (2,), (0, 1, 2, 3)):
        for leaf_hook in (False, True):
            same(gradients(model, run, used, leaf_hook), gradients(model, model, used, leaf_hook))


@pytest.mark.usefixtures("double_precision")
def test_gradients_of_some_values_alone() -> None:
    """``torch.autograd.grad`` names an operand to which the loop's own node does not lead, alone and beside others,
    twice of a graph that is kept."""
    model = Heads(Adding.apply, "state")
    run = both("front", model)
    x_TBH = torch.randn(T, B, H, requires_grad=True)
    leaves = {"first": model.first, "w": model.w, "v": model.v, "x": x_TBH}
    for names in (("v",), ("first",), ("w", "x"), ("first", "v"), tuple(leaves)):
        for used in ((0,), (0, 1), (1, 2, 3)):
            found: list[Any] = []
            for each in (model, run):
                results = each(x_TBH)
                loss = sum(results[number].square().sum() for number in used)
                asked = [leaves[name] for name in names]
                for keep in (True, False):
                    found += torch.autograd.grad(loss, asked, retain_graph=keep, allow_unused=True)
            same(found[len(found) // 2 :], found[: len(found) // 2])


class Delayed(nn.Module):
    """A delay of two steps: each of the first states reaches other results than the other."""

    def forward(self, x_TBH: Tensor, a_BH: Tensor, b_BH: Tensor) -> tuple[Tensor, Tensor]:
        for t in range(x_TBH.shape[0]):
            a_BH, b_BH = torch.tanh(0.5 * b_BH + x_TBH[t] * 0), a_BH
        return a_BH, b_BH


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("segment", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["store_all", "standard"])
def test_states_that_take_turns(schedule: str, segment: int) -> None:
    model = Delayed()
    run = reroll.compile(
        model, time_dim={"x_TBH": 0, "a_BH": None, "b_BH": None}, lowering="eager", schedule=schedule, segment=segment
    )
    for steps in (8, 9):
        for used in ((0,), (1,), (0, 1)):
            found = []
            for each in (model, run):
                torch.manual_seed(2)
                x_TBH, a_BH, b_BH = (torch.randn(*size, requires_grad=True) for size in ((steps, B, H), (B, H), (B, H)))
                given = [Adding.apply(value) for value in (a_BH, b_BH)]  # type: ignore[no-untyped-call]
                results = each(x_TBH, *given)
                sum(results[number].sum() for number in used).backward()
                found.append([x_TBH.grad, a_BH.grad, b_BH.grad])
            same(found[1], found[0])


@pytest.mark.usefixtures("double_precision")
def test_a_state_that_is_looked_at_and_a_checkpoint() -> None:
    """Hooks on results, and a graph that is made again in the backward."""
    model = Heads(hooked, "state")
    run = both("front", model)
    seen = []
    for each in (model, run):
        for again in (False, True):
            torch.manual_seed(3)
            x_TBH, shown = torch.randn(T, B, H, requires_grad=True), list[Tensor]()
            results = checkpoint(each, x_TBH, use_reentrant=False) if again else each(x_TBH)
            results[1].register_hook(shown.append)
            (results[1].sum() + results[3].square().sum()).backward()
            seen.append([*shown, *(parameter.grad for parameter in model.parameters()), x_TBH.grad])
            model.zero_grad()
    same(seen[2], seen[0])
    same(seen[3], seen[1])


@pytest.mark.usefixtures("double_precision")
def test_an_operand_that_is_changed_before_the_backward_is_refused() -> None:
    model = Heads(Adding.apply, "state")
    results = both("front", model)(torch.randn(T, B, H))
    with torch.no_grad():
        model.v.mul_(2)
        model.w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[1].sum().backward()
