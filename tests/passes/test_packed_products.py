"""Products with packed weights: what the kernel gives, and which products it is given."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import CONTEXT, compiled, kinds, traced
from reroll.backends.inductor.native_products import edition, vectors
from reroll.program.registry import run_on_half
from reroll.segment.ops import PACK, PACKED_PRODUCT

pytestmark = pytest.mark.inductor
SIZES = [
    (1, 1, 1),
    (2, 5, 15),
    (3, 7, 16),
    (4, 32, 31),
    (11, 3, 17),
    (12, 9, 33),
    (23, 64, 48),
    (32, 70, 100),
    (97, 8, 40),
]
DEEP = (13, 4100, 20)  # the panel is read in 17 parts
EDITION = edition()
WIDE = (40, 256, 80)  # enough for two threads


def product(x: Tensor, w: Tensor) -> Tensor:
    made: Tensor = PACKED_PRODUCT(x, PACK(w), w.shape[1], EDITION)
    return made


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 20)


def right_for_odd_sizes(dtype: torch.dtype) -> None:
    values = [torch.randn(s, dtype=dtype) for m, k, n in (*SIZES, DEEP, WIDE) for s in ((m, k), (k, n))]
    pairs = list(zip(values[::2], values[1::2], strict=True))
    found = compiled(lambda pairs: [product(x, w) for x, w in pairs], pairs)
    for made, (x, w) in zip(found, pairs, strict=True):
        close(made, x @ w)
        close(product(x, w), x @ w)


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.float64, 2)])
def test_the_kernel_is_right_for_odd_sizes(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        right_for_odd_sizes(dtype)
    finally:
        torch.set_num_threads(before)


def test_the_kernel_is_right_with_shorter_vectors() -> None:
    wide = vectors()
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert vectors() == wide
        right_for_odd_sizes(torch.float32)


def test_rows_give_the_same_bits_in_any_company() -> None:
    x, w = torch.randn(75, 300), torch.randn(300, 90)
    parts = (1, 11, 12, 23, 75)
    whole = compiled(product, x, w)
    for rows, found in zip(parts, compiled(lambda x, w: [product(x[:n], w) for n in parts], x, w), strict=True):
        assert torch.equal(found, whole[:rows])


def test_operands_may_lie_in_any_way() -> None:
    base, w = torch.randn(2, 9, 40), torch.randn(24, 20)

    def all_ways(base: Tensor, w: Tensor) -> list[Tensor]:
        made = base.sin()
        views = [source[1, :, 3:23] for source in (base, made)]
        views += [source[0].T[:20, :7].T for source in (base, made)]
        views += [source[0, :, ::2] for source in (base, made)]
        views += [source[0, :, 1:2].expand(-1, 20) for source in (base, made)]
        return [product(view, other) for view in views for other in (w.T, w.T.contiguous())]

    for found, expected in zip(compiled(all_ways, base, w), all_ways(base, w), strict=True):
        close(found, expected)


def test_other_bytes_of_a_buffer_are_no_rows() -> None:
    words, w = torch.randint(-9, 9, (6, 16), dtype=torch.int32), torch.randn(16, 8)

    def half(words: Tensor, w: Tensor) -> Tensor:
        return product((words + 2**29).view(torch.float32), w)

    close(compiled(half, words, w), half(words, w))


def left(function: Any, values: list[Tensor], constants: int) -> Counter[str]:
    """The operations of a half whose results the pass is seen to keep."""
    found = run_on_half(
        ("pack-weights",), traced(function, values, constants), replace(CONTEXT, lowering="inductor", vectors=True)
    )
    for one, other in zip(found(*values), function(*values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return kinds(found.graph)


def doubles(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_a_weight_is_packed_once_for_all_its_products() -> None:
    def half(x: Tensor, bias: Tensor, w: Tensor) -> Any:
        h = torch.tanh(x @ w.T)
        return h @ w.T, torch.addmm(bias, h, w), h.sum(0)

    kept = left(half, doubles((3, 10), (10,), (10, 10)), 2)
    assert (kept["packed_product"], kept["pack_weight"]) == (3, 2)
    assert kept["mm"] + kept["addmm"] == 0


def test_products_of_what_changes_and_of_few_columns_are_left() -> None:
    def half(x: Tensor, g: Tensor, narrow: Tensor, w: Tensor) -> Any:
        return x.T @ g, x @ narrow, w @ x.T, w @ w.T

    assert left(half, doubles((3, 10), (3, 12), (10, 4), (10, 10)), 2)["packed_product"] == 0


def test_what_is_drawn_anew_is_not_packed() -> None:
    def half(x: Tensor, w: Tensor) -> Any:
        return (x @ (torch.rand_like(w) * w),)

    found = traced(half, doubles((3, 10), (10, 10)), 1)
    run_on_half(("pack-weights",), found, replace(CONTEXT, vectors=True))
    assert kinds(found.graph)["packed_product"] == 0


def test_deep_products_are_as_exact_as_torch_s() -> None:
    x, w = torch.rand(8, 4096), torch.rand(4096, 32)
    exact = x.double() @ w.double()
    errors = [(made - exact).square().mean().sqrt() for made in (compiled(product, x, w), x @ w)]
    assert errors[0] < 3 * errors[1]


def test_a_network_without_vectors() -> None:
    model, x = TwoWeights().double(), torch.randn(8, 3, 21, dtype=torch.float64)
    with torch._inductor.config.patch({"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}):
        assert not vectors()
        compared(model, reroll.compile(model, segment=1), x)


class TwoWeights(nn.Module):
    """A recurrence of low rank with a bias, and a readout as wide as one vector and a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(21, 9), nn.Linear(9, 21, bias=False)
        self.out = nn.Linear(21, 17)

    def forward(self, x_TBH: Tensor) -> Tensor:
        h_BH, outs = x_TBH.new_zeros(x_TBH.shape[1:]), []
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(x_TBH[t] + self.up(self.down(h_BH)))
            outs.append(self.out(h_BH))
        return torch.stack(outs)


@pytest.mark.parametrize(("batch", "schedule"), [(1, "store_all"), (3, "standard")])
def test_a_network_trains_as_eager_does_at_every_length(batch: int, schedule: str) -> None:
    model = TwoWeights().double()
    rolled = reroll.compile(model, lowering="inductor", schedule=schedule, verify=True, segment=2)
    for steps in (20, 7, 33, 129):
        compared(model, rolled, torch.randn(steps, batch, 21, dtype=torch.float64))


def compared(model: nn.Module, rolled: Any, x: Tensor) -> None:
    """Outputs and gradients of one are those of the other."""
    results = []
    for run in (model, rolled):
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
