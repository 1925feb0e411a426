"""Gradients that are products are formed where they are added up, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import kinds, traced, weights
from reroll.planning.options import Lowering
from reroll.segment.factors import defer_products


def test_only_products_that_nobody_else_reads_are_deferred() -> None:
    def half(x: Tensor, g: Tensor) -> Any:
        read, twice = x.T @ g, g.T @ g
        turned = (x.T @ g.sin()).T
        return x.T @ x, read, read.sum(), g.T @ x, twice, twice, 2 * (x.T @ g.exp()), x.T @ g.cos(), turned

    values = weights((5, 3), (5, 4))
    made = traced(half, values, 0)
    products = defer_products(made, [True, True, True, False, True, True, True, True, True])
    assert set(products) == {0, 7, 8}
    assert kinds(made.graph)["mm"] == 4
    found = list(made(*values))
    for number, product in products.items():
        assert found[number] is None
        found[number] = torch.zeros_like(half(*values)[number])
        product.add_to(found[number], found[product.left], found[product.right])
    for one, other in zip(found, half(*values), strict=False):
        torch.testing.assert_close(one, other)


def test_a_factor_of_two_products_is_given_once() -> None:
    made = traced(lambda x, g: (g.T @ x, g.T @ x.exp()), weights((5, 3), (5, 4)), 0)
    products = defer_products(made, [True, True])
    results: Any = made.graph.output_node().args[0]
    assert products[0].left == products[1].left
    assert len(results) == 5


class Shared(nn.Module):
    """One weight for input and state, and one that is used transposed as well."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(4, 6) / 3)

    def forward(self, x_TBH: Tensor) -> Tensor:
        h_BH, outs = x_TBH.new_zeros(x_TBH.shape[1:]), []
        for x_BH in x_TBH:
            h_BH = torch.tanh(x_BH @ self.w.T + h_BH @ self.w.T + (h_BH @ self.v.T) @ self.v)
            outs.append(h_BH @ self.v.T)
        return torch.stack(outs)


@pytest.mark.parametrize("schedule", ["store_all", "standard"])
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_weights_that_are_used_in_several_ways(schedule: str, lowering: Lowering) -> None:
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(41, 3, 6, dtype=torch.float64)
    compiled = reroll.compile(model, time_dim=0, lowering=lowering, schedule=schedule, segment=3)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    loss = compiled(x).square().sum()
    for _ in range(2):  # the second reversal starts from nothing again
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_no_product_of_the_size_of_a_weight_is_held_beside_the_gradient() -> None:
    model, x = nn.RNNCell(8, 300), torch.randn(40, 2, 8)

    def loop(x_TBN: Tensor) -> Tensor:
        h_BH = x_TBN.new_zeros(2, 300)
        for x_BN in x_TBN:
            h_BH = model(x_BN, h_BH)
        return h_BH.square().sum()

    compiled = reroll.compile(loop, time_dim=0, lowering="eager", schedule="standard")
    compiled(x).backward()
    with torch.profiler.profile(record_shapes=True) as profile:
        compiled(x).backward()
    formed = [e for e in profile.events() if e.name == "aten::addmm_" and e.input_shapes[0] == [300, 300]]
    alone = [e for e in profile.events() if e.name == "aten::mm" and e.input_shapes[0][0] == 300]
    assert len(formed) > 5
    assert len(alone) <= 3
