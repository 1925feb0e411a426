"""Products of spikes with packed weights: what the kernel gives and counts, and which products it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import CONTEXT, compiled, kinds, traced
from networks import Spike, spikes
from reroll.backends.inductor.native_products import edition
from reroll.program.registry import run_on_half
from reroll.segment.ops import PACK, PACKED_EVENTS

pytestmark = pytest.mark.inductor
SIZES = [(1, 1, 1), (2, 5, 15), (3, 16, 16), (5, 33, 31), (70, 40, 33), (65, 300, 70), (130, 17, 100)]
EDITION = edition()
EVENTS = replace(CONTEXT, lowering="inductor", vectors=True)


def product(z: Tensor, w: Tensor, counts: Tensor, crossover: float = 0.5) -> Tensor:
    made: Tensor = PACKED_EVENTS(z, PACK(w), counts, w.shape[1], crossover, EDITION)
    return made


def sparse(m: int, k: int, density: float, dtype: torch.dtype) -> Tensor:
    return torch.where(torch.rand(m, k) < density, torch.randn(m, k, dtype=dtype), 0)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.float64, 2), (torch.float32, 2)])
def test_the_kernel_is_right_and_counts_right(dtype: torch.dtype, threads: int) -> None:
    triples = [
        (sparse(m, k, density, dtype), torch.randn(k, n, dtype=dtype), torch.zeros(4, dtype=torch.int64))
        for m, k, n in (*SIZES, (256, 256, 256))
        for density in (0.0, 0.2, 0.9)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = compiled(lambda triples: [product(*triple) for triple in triples], triples)
    finally:
        torch.set_num_threads(before)
    for made, (z, w, counts) in zip(found, triples, strict=True):
        close(made, z @ w)
        close(product(z, w, counts), z @ w)
        seen = int(z.count_nonzero())
        assert counts.tolist() == [1, seen <= 0.5 * z.numel(), z.numel(), seen]


def test_rows_give_the_same_bits_in_any_company() -> None:
    z, w, counts = sparse(150, 300, 0.2, torch.float32), torch.randn(300, 90), torch.zeros(4, dtype=torch.int64)
    parts = (1, 7, 64, 65, 150)
    found = compiled(lambda z, w, counts: [product(z[:n], w, counts) for n in parts], z, w, counts)
    for rows, part in zip(parts, found, strict=True):
        assert torch.equal(part, found[-1][:rows])


def test_operands_may_lie_in_any_way() -> None:
    base, w, counts = sparse(2 * 9, 40, 0.2, torch.float64).view(2, 9, 40), torch.randn(24, 20).double(), torch.zeros(4)
    counts = counts.long()

    def all_ways(base: Tensor, w: Tensor, counts: Tensor) -> list[Tensor]:
        views = [source[1, :, 3:23] for source in (base, base * 2)]
        views += [source[0].T[:20, :7].T for source in (base, base * 2)]
        views += [base[0, :, ::2], (base * 2)[0, :, 1:2].expand(-1, 20)]
        return [product(view, other, counts, 1.0) for view in views for other in (w.T, w.T.contiguous())]

    for found, expected in zip(compiled(all_ways, base, w, counts), all_ways(base, w, counts), strict=True):
        close(found, expected)


def test_what_is_no_number_is_no_zero() -> None:
    z, w, counts = torch.zeros(2, 40), torch.randn(40, 50), torch.zeros(4, dtype=torch.int64)
    z[0, 3], z[1, 39] = float("nan"), float("inf")
    found = compiled(product, z, w, counts)
    assert found[0].isnan().all()
    assert torch.equal(found[1], float("inf") * w[39])
    assert counts.tolist() == [1, 1, 80, 2]


def doubles(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_spikes_meet_packed_weights_where_these_are_constant() -> None:
    def half(v: Tensor, made: Tensor, w: Tensor, bias: Tensor) -> Any:
        z = (v > 1).double()
        return z @ w.T, torch.addmm(bias, z, w.T), z @ made, v @ w.T

    values = [doubles(32, 256), doubles(256, 256), doubles(256, 256), doubles(256)]
    passes = ("event-products", "pack-weights")
    found = run_on_half(passes, traced(half, values, 2), EVENTS)
    kept = kinds(found.graph)
    assert (kept["packed_event_product"], kept["packed_product"], kept["pack_weight"]) == (2, 1, 1)
    assert (kept["event_product"], kept["event_rows"]) == (1, 0)
    for one, other in zip(found(*values), half(*values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


class TwoPopulations(nn.Module):
    """Leaky neurons behind spiking inputs, and a second population that excites them by a weight that lies turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 208), nn.Linear(208, 192, bias=False)
        self.back = nn.Parameter(torch.randn(208, 192) / 30)

    def forward(self, x_TBI: Tensor) -> Tensor:
        u, v = x_TBI.new_zeros(x_TBI.shape[1], 208), x_TBI.new_zeros(x_TBI.shape[1], 192)
        total = z = torch.zeros_like(v)
        for t in range(x_TBI.shape[0]):
            u = 0.9 * u + self.first(x_TBI[t]) + z @ self.back.T
            y: Any = Spike.apply(u)  # type: ignore[no-untyped-call]
            v = 0.8 * v + self.second(y)
            z = Spike.apply(v - 0.2)  # type: ignore[no-untyped-call]
            u, v, total = u - y, v - z, total + z
        return total


@pytest.mark.slow
def test_gradients_of_their_weights_are_added_by_events() -> None:
    torch.manual_seed(0)
    model = TwoPopulations().double()
    run = reroll.compile(model, lowering="inductor", segment=8)
    for steps in (25, 29):
        x = spikes(steps, 16, 192).double()
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        loss = run(x).square().sum()
        with torch.profiler.profile() as profile:
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for _ in range(2):  # the second reversal starts from nothing again
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12 * float(other.abs().max()))
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        names = [event.name for event in profile.events()]
        assert names.count("reroll::event_outer_add") == 3 * (steps // 8)
        assert "reroll::event_outer" not in names
