"""What depends on constants of the loop alone is made once per call, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import kinds, traced, weights
from reroll.segment.invariants import Once


def named(function: Any, values: list[Tensor], constants: int) -> Any:
    half = traced(function, values, constants)
    placeholders = half.graph.find_nodes(op="placeholder")[len(values) - constants :]
    for number, node in enumerate(placeholders):
        node.meta["constant"] = f"w{number}"
    return half


def test_products_of_weights_are_moved_and_pointwise_work_stays() -> None:
    def half(x: Tensor, a: Tensor, b: Tensor, unused: Tensor) -> Any:
        low_rank = a @ b.exp()
        return x @ low_rank, torch.tanh(x) @ low_rank.abs(), a.exp() * x.sum(), low_rank.sum()

    values = weights(*[(3, 4), (4, 2), (2, 4), (7, 7)])
    made, once = named(half, values, 3), Once(["w0", "w1", "w2"])
    places = once.take(made)
    left = kinds(made.graph)
    assert len(places) == len(set(places)) == 2
    assert (left["mm"], left["exp"], left["abs"], left["sum"]) == (2, 1, 1, 1)
    invariants = once.values(values[1:])
    assert once.nbytes == sum(each.nbytes for each in invariants) == 4 * 4 * 4 + 4
    for found, expected in zip(made(*values, *(invariants[p] for p in places)), half(*values), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_product_under_pointwise_work_is_moved() -> None:
    once = Once(["w0", "w1"])
    values = weights((3, 4), (4, 2), (2, 4))
    made = named(lambda x, a, b: (x @ torch.tanh((a @ b).t()), x @ (a @ b)), values, 2)
    assert once.take(made) == (0,)
    assert (kinds(made.graph)["mm"], kinds(made.graph)["tanh"]) == (2, 1)


def test_equal_invariants_of_two_halves_are_one() -> None:
    once = Once(["w0", "w1"])
    values = weights((3, 4), (4, 2), (2, 4))
    first = once.take(named(lambda x, a, b: (x @ (a @ b),), values, 2))
    second = once.take(named(lambda x, a, b: ((a @ b) * x.sum(), b @ a), values, 2))
    assert first == (0,)
    assert second == (0, 1)
    assert len(once.values(values[1:])) == 2


def test_random_numbers_are_drawn_every_time() -> None:
    once = Once(["w0"])
    values = weights((3, 4), (4, 4))
    made = named(lambda x, w: (x @ (torch.rand_like(w) @ w), x @ torch.bernoulli(w.sigmoid())), values, 1)
    assert once.take(made) == ()
    assert once.values(values[1:]) == []


class LowRank(nn.Module):
    """A recurrent weight of low rank, which the user makes anew at every step; a mask that changes at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 2) / 3), nn.Parameter(torch.randn(2, 6) / 3)

    def forward(self, x_TBH: Tensor) -> Tensor:
        h_BH = x_TBH.new_zeros(x_TBH.shape[1:])
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(x_TBH[t] + h_BH @ (self.a @ self.b) / (1 + (self.a @ self.b).norm()))
        return h_BH


@pytest.mark.usefixtures("unproved")  # the second call would look at the model again
@pytest.mark.parametrize("schedule", ["store_all", "standard"])
def test_a_weight_made_in_the_loop_is_made_once_in_each_half(schedule: str) -> None:
    torch.manual_seed(0)
    model, x = LowRank().double(), torch.randn(41, 3, 6, dtype=torch.float64)
    compiled = reroll.compile(model, lowering="eager", schedule=schedule)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled(x)
    with torch.profiler.profile(record_shapes=True) as profile:
        loss = compiled(x).square().sum()
    made = [event for event in profile.events() if event.name == "aten::mm" and event.input_shapes == [[6, 2], [2, 6]]]
    assert len(made) == 2  # the first step, whose state is zeros, stands before the loop
    for found, each in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        model.a.mul_(0.5)  # a call sees the weights of its time
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
