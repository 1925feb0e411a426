"""Rows of a loop that capture gathers: a value of the plain model that gets no gradient gets none, not zeros; and what
is one value there, a stack, gives all that is in it a gradient, if only of zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.runtime import undefined_grads

STEPS = 9
Results = Sequence[Tensor]


class Own(nn.Module):
    """A loop of which each step has a weight of its own, or every second one, and what ``reads`` makes of its rows."""

    def __init__(self, reads: Callable[[list[Tensor], Tensor], Results], weights: int = STEPS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(weights))
        self.reads = reads

    def forward(self, x_TBH: Tensor, h_BH: Tensor) -> Results:
        rows, first = [], h_BH
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(x_TBH[t] + self.layers[t % len(self.layers)](h_BH))
            rows.append(h_BH)
        return self.reads(rows, first)


class Turned(Own):
    """From behind, with other first steps, and a sum of what every other row gives."""

    def __init__(self, reads: Callable[[list[Tensor], Tensor], Results], weights: int = STEPS) -> None:
        super().__init__(reads, weights)
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x_TBH: Tensor, h_BH: Tensor) -> Results:
        rows, first = list[Tensor](), h_BH
        for t in reversed(range(x_TBH.shape[0])):
            read_BH = 2 * x_TBH[t] if t < 2 else x_TBH[t] @ self.weight
            h_BH = torch.tanh(read_BH.clamp(-0.7, 0.8) + self.layers[t % len(self.layers)](h_BH))
            rows.append(h_BH)
        made = [torch.tanh(each @ self.weight) for each in rows]
        return (*self.reads(rows, first), *[each.sin() for each in rows], sum(made[1::2], first * 0))


def strided(rows: list[Tensor], _: Tensor) -> Results:
    return torch.stack(rows[::2]), torch.stack(rows[1::2]), rows[-1]


def parts(rows: list[Tensor], _: Tensor) -> Results:
    return torch.stack(rows[:3]).mean(0), torch.stack(rows[3:6]), torch.cat(rows[1:3], 1), rows[3] * 2


def backwards(rows: list[Tensor], _: Tensor) -> Results:
    return torch.stack(rows[:5][::-1]), torch.stack(rows[6:2:-2]), torch.stack([rows[4], rows[2], rows[3]])


def beside_a_row(rows: list[Tensor], first: Tensor) -> Results:
    return torch.stack([first, rows[1], rows[2], rows[3]]), torch.stack([rows[0], rows[4], rows[5]], 1), first + rows[2]


def mapped(rows: list[Tensor], _: Tensor) -> Results:
    made = [each.sin() for each in rows]
    return torch.stack(made[:3]), made[2], torch.stack(made[4:]), rows[1][0], *[each[0] for each in rows]


def by_another_loop(rows: list[Tensor], k_BH: Tensor) -> Results:
    made = []
    for each in rows[:3] + rows[4:]:
        k_BH = torch.tanh(k_BH.sum() * each)
        made.append(k_BH)
    return made


def by_two(rows: list[Tensor], k_BH: Tensor) -> Results:
    made = []
    for part in (rows[::2], rows[2:]):
        for each in part:
            k_BH = torch.tanh(k_BH.sum() * each)
            made.append(k_BH)
    return made


def one_value(rows: list[Tensor], k_BH: Tensor) -> Results:
    stack_TBH, made = torch.stack(rows), []
    for each in stack_TBH:
        k_BH = torch.tanh(k_BH.sum() * each)
        made.append(k_BH)
    return (*made, stack_TBH[1], stack_TBH[2:4])


def one_value_of_some(rows: list[Tensor], k_BH: Tensor) -> Results:
    made = []
    for each in torch.stack(rows[2:]):
        k_BH = torch.tanh(k_BH.sum() * each)
        made.append(k_BH)
    return made


def one_value_mapped(rows: list[Tensor], _: Tensor) -> Results:
    return [each.sin() for each in torch.stack(rows)]


ONE_VALUE = (one_value, one_value_of_some, one_value_mapped)
READS = (strided, parts, backwards, beside_a_row, mapped, by_another_loop, by_two, *ONE_VALUE)


def gradients(model: nn.Module, run: Callable[..., Any]) -> list[tuple[Tensor | None, ...]]:
    """Those of each result by itself, and of two of them together."""
    torch.manual_seed(1)
    given = torch.randn(STEPS, 2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    leaves, results = [*given, *model.parameters()], run(*given)
    losses = [each.square().sum() for each in results]
    losses.append(losses[0] + losses[-1])
    return [torch.autograd.grad(each, leaves, allow_unused=True, retain_graph=True) for each in losses]


def both(model: nn.Module, door: str) -> Any:
    how: dict[str, Any] = {"lowering": "eager", "proof": "never"}
    if door == "backend":
        return torch.compile(model, backend="reroll", options=how)
    return reroll.compile(model, **how)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("weights", [STEPS, 2])
@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.filterwarnings("ignore")
def test_each_result_by_itself(reads: Callable[..., Results], door: str, weights: int) -> None:
    torch.manual_seed(0)
    model = Own(reads, weights)
    compiled, want = both(model, door), gradients(model, model)
    assert weights == 2 or reads in ONE_VALUE or any(each is None for found in want for each in found)
    for found, expected in zip(gradients(model, compiled), want, strict=True):
        assert [each is None for each in found] == [each is None for each in expected]
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("weights", [STEPS, 2])
@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("reads", [strided, mapped])
@pytest.mark.filterwarnings("ignore")
def test_steps_that_are_taken_off_a_loop(reads: Callable[..., Results], door: str, weights: int) -> None:
    torch.manual_seed(0)
    model = Turned(reads, weights)
    for found, expected in zip(gradients(model, both(model, door)), gradients(model, model), strict=True):
        assert [each is None for each in found] == [each is None for each in expected]
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("reads", [strided, parts, one_value])
def test_it_is_the_told_rows_that_do_it(reads: Callable[..., Results], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll.backends.dynamo.entry.as_collected", lambda *_: None)
    model = Own(reads)
    pairs = zip(gradients(model, both(model, "compile")), gradients(model, model), strict=True)
    assert any([each is None for each in found] != [each is None for each in want] for found, want in pairs)


def test_rows_that_reach_all_are_gathered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop whose rows all reach the same is not told of them: what gathers them is torch's own."""
    seen, original = list[bool](), undefined_grads.tells_rows

    def noted(recurrence: Any) -> bool:
        seen.append(original(recurrence))
        return seen[-1]

    monkeypatch.setattr("reroll.backends.runtime.node.tells_rows", noted)
    monkeypatch.setattr(undefined_grads, "collected", lambda *_: pytest.fail("it is told"))
    model = Own(strided, 1)
    gradients(model, both(model, "compile"))
    assert seen
    assert not any(seen)
