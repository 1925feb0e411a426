"""Rewrites of a segment's graphs: the same results but for rounding, with as few products as the loop allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import reroll.segment.products
from halves import BOTH, CONTEXT, B, Function, H, N, T, kinds, rewritten, traced, weights
from reroll.errors import PassError
from reroll.program.registry import register_pass, run_on_half

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_products_outside_of_the_cycle_become_one(dim: int) -> None:
    def half(x: Tensor, h_BH: Tensor, wi: Tensor, bi: Tensor, wr: Tensor, wo: Tensor) -> Any:
        items = [x.select(dim, t) for t in range(T)]
        for t in range(T):
            h_BH = torch.tanh(torch.addmm(bi, items[t], wi) + h_BH @ wr)
            items[t] = h_BH @ wo
        return (h_BH, *items)

    sizes = (T, B, N) if dim == 0 else (B, T, N)
    left = rewritten(half, weights(sizes, (B, H), (N, H), (H,), (H, H), (H, 2)), 4)
    assert (left["addmm"], left["mm"]) == (1, T + 1)
    assert left["cat"] == 1  # of the states; the inputs are a view


def test_convolutions_and_embeddings_are_done_together() -> None:
    def half(x: Tensor, index: Tensor, h: Tensor, kernel: Tensor, table: Tensor) -> Any:
        for t in range(T):
            h = 0.5 * h + F.conv2d(x[t], kernel) * F.embedding(index[t], table)[:, None, None, :3]
        return (h,)

    values = [torch.randn(T, B, 2, 5, 5), torch.randint(7, (T, B)), *weights((B, 1, 3, 3), (1, 2, 3, 3), (7, 4))]
    left = rewritten(half, values, 2)
    assert (left["convolution"], left["embedding"]) == (1, 1)


@pytest.mark.parametrize("order", [(0, -1), (-1, 0), (-1, -2), (1, -3)], ids=str)
def test_items_counted_from_the_end_are_in_their_place(order: tuple[int, int]) -> None:
    def half(x: Tensor, y: Tensor, w: Tensor) -> Any:
        first, second = (x.select(0, at) for at in order)
        return first @ w, second @ w, x[0].t() @ y.select(0, order[0]) + x[1].t() @ (2 * y).select(0, order[1])

    for size in (2, 3):
        if max(map(abs, order)) <= size:
            rewritten(half, weights((size, B, N), (size, B, H), (N, H)), 1)


@pytest.mark.parametrize(("vectors", "count", "left"), [(True, 63, 1), (True, 64, 2), (False, 64, 1)])
def test_on_a_cpu_products_of_many_rows_stay_apart(vectors: bool, count: int, left: int) -> None:
    def half(x: Tensor, w: Tensor) -> Any:
        return (x[0] @ w + torch.tanh(x[1] @ w),)

    graph = traced(half, weights((2, count, N), (N, H)), 1)
    assert kinds(run_on_half(BOTH, graph, replace(CONTEXT, vectors=vectors)).graph)["mm"] == left


@pytest.mark.parametrize(("vectors", "count", "left"), [(True, H // 2 - 1, 1), (True, H, 2), (False, H, 1)])
def test_on_a_cpu_gradients_of_many_rows_stay_apart(vectors: bool, count: int, left: int) -> None:
    """So do sums of rows, and numbers, which are of one entry."""

    def half(x: Tensor, g: Tensor) -> Any:
        return (
            x[0].t() @ g[0] + x[1].t() @ g[1],
            x[0].sum([0], True) + x[1].sum([0], True),
            x[0].sum([0, 1]) + x[1].sum([0, 1]),
        )

    graph = traced(half, weights((2, count, H), (2, count, N)), 0)
    found = kinds(run_on_half(BOTH, graph, replace(CONTEXT, vectors=vectors)).graph)
    assert (found["mm"], found["sum"]) == (left, left + (2 if vectors else 1))


def test_what_is_put_together_of_a_whole_product_is_the_product() -> None:
    def half(x: Tensor, w: Tensor, part: Tensor) -> Any:
        first, second = x[0] @ w, x[1] @ w
        return torch.cat([first, second]).tanh(), torch.cat([second, first]).exp(), torch.cat([first, part]).sin()

    left = rewritten(half, weights((2, B, N), (N, H), (B, H)), 2)
    assert (left["mm"], left["cat"]) == (1, 2)


def test_rows_of_other_widths_and_biases_that_differ_by_row_stay_apart() -> None:
    def half(x: Tensor, image: Tensor, index: Tensor, b: Tensor, bb: Tensor, w: Tensor, k: Tensor, e: Tensor) -> Any:
        products = [torch.addmm(bias, x[t], w) for t in range(2) for bias in (b, bb, b[None])]
        scaled = [torch.addmm(b, x[t], w, alpha=2.0, beta=0.5) for t in range(2)]
        maps = [F.conv2d(part, k) for part in (image, image[..., 1:], image + 1)]
        single = [F.conv2d(part, k) for part in (image[0], image[0] * 2)]
        rows = [F.embedding(part, e) for part in (index, index[:, None], index + 1, index[0], index[1])]
        return (*products, *scaled, *maps, *single, *rows)

    index = torch.tensor([0, 2, 1])
    values = [*weights((2, B, N), (B, 1, 5, 5)), index, *weights((H,), (B, H), (N, H), (2, 1, 3, 3), (7, 4))]
    left = rewritten(half, values, 5)
    assert left["addmm"] == 1 + 2 + 1 + 1


def test_products_of_several_dtypes_stay_apart() -> None:
    def half(x: Tensor, w: Tensor) -> Any:
        return x[0] @ w, (x[1].float() @ w.float()).double(), x[2] @ w, (x[3].float() @ w.float()).double()

    assert rewritten(half, weights((4, B, N), (N, H)), 1)["mm"] == 2


def test_a_product_of_two_weights_in_one_step_is_no_sum_over_steps() -> None:
    def half(x: Tensor, h_BH: Tensor, wi: Tensor, wr: Tensor) -> Any:
        return (x @ wi + h_BH @ wr,)

    assert rewritten(half, weights((B, N), (B, H), (N, H), (H, H)), 2)["mm"] == 2


def test_random_numbers_are_drawn_in_their_order() -> None:
    def half(x: Tensor, h_BH: Tensor, wi: Tensor, wr: Tensor) -> Any:
        found = []
        for t in range(T):
            found.append(torch.bernoulli(torch.sigmoid(h_BH @ wi)))
            h_BH = torch.tanh(h_BH @ wr + x[t]) * torch.bernoulli(torch.full_like(h_BH, 0.5))
        return found

    agree_with_a_seed(half, weights((T, B, H), (B, H), (H, N), (H, H)), 2)


def test_what_nobody_knows_may_draw_random_numbers() -> None:
    def half(x: Tensor, h_BH: Tensor, wr: Tensor, wo: Tensor) -> Any:
        found = []
        for t in range(T):
            found.append(torch.ops.reroll_tests.noisy(h_BH @ wo))
            h_BH = torch.tanh(torch.ops.reroll_tests.noisy(h_BH @ wr + x[t]))
        return found

    with torch.library._scoped_library("reroll_tests", "DEF") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")
        agree_with_a_seed(half, weights((T, B, H), (B, H), (H, H), (H, N)), 2)


def agree_with_a_seed(half: Function, values: list[Tensor], constants: int) -> None:
    made = run_on_half(BOTH, traced(half, values, constants), CONTEXT)
    torch.manual_seed(1)
    expected = half(*values)
    torch.manual_seed(1)
    for one, other in zip(made(*values), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_no_more_is_brought_together_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(x: Tensor, w: Tensor) -> Any:
        return tuple(row @ w for row in x.unbind())

    values = weights((12, B, N), (N, H))
    assert rewritten(half, values, 1)["mm"] == 1
    monkeypatch.setattr(reroll.segment.products, "LARGEST", {"cpu": 4 * 8 * B * (N + H)})
    assert rewritten(half, values, 1)["mm"] == 3


def test_equal_nodes_become_one_but_random_numbers_and_results_do_not() -> None:
    def half(x: Tensor) -> Any:
        noise = torch.rand_like(x) + torch.rand_like(x)
        return x * 2, x * 2, (x + 1).sin() * (x + 1.0).sin() + (x + 1).sin(), noise

    left = kinds(traced(half, weights((B,)), 0).graph)
    assert left == Counter(rand_like=2, mul=3, sin=2, add=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda half, context: None, "must return a GraphModule"),
        (lambda half, context: fx.symbolic_trace(lambda other: (other,)), "changed the operands or results"),
    ],
)
@pytest.mark.usefixtures("fresh_registry")
def test_a_wrong_pass_on_halves_is_named(wrong: Any, message: str) -> None:
    register_pass("wrong", on="half")(wrong)
    with pytest.raises(PassError, match=f"Pass 'wrong' {message}"):
        run_on_half(("wrong",), traced(lambda x: (x + 1,), weights((B,)), 0), CONTEXT)


def test_values_whose_memory_is_read_as_it_lies_stay() -> None:
    def half(x: Tensor, w: Tensor) -> Any:
        parts = [torch.as_strided(x[t].clone() @ w, (4,), (5,), 1) for t in range(T)]
        return (sum(parts),)

    assert rewritten(half, weights((T, B, N), (N, H)), 1)["mm"] == T


def test_biases_are_added_where_points_are_read() -> None:
    def half(x: Tensor, w: Tensor, b: Tensor) -> Any:
        gates = torch.addmm(b, x, w).chunk(2, 1)
        kept = torch.addmm(b, torch.tanh(x), w)
        return torch.sigmoid(gates[0]) * gates[1].tanh(), kept, kept.exp(), torch.addmm(b[:1], x, w).relu()

    values = weights((B, N), (N, H), (H,))
    expected = half(*values)
    for lowering, left in (("inductor", 1), ("eager", 3)):
        context = replace(CONTEXT, lowering=lowering)
        found = run_on_half(("split-biases",), traced(half, values, 2), context)
        assert kinds(found.graph)["addmm"] == left
        for one, other in zip(found(*values), expected, strict=True):
            assert torch.equal(one, other) or lowering == "inductor"
            torch.testing.assert_close(one, other)
