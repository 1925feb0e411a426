"""Which products of a segment are done by events, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import CONTEXT, kinds, traced
from networks import RecurrentLIF, Spike, spikes
from reroll.passes.segment.event_products import too_small
from reroll.program.context import Context
from reroll.program.registry import run_on_half
from reroll.report.rewrites import Rewrite
from reroll.segment.facts import bits

EVENTS = replace(CONTEXT, lowering="inductor")
M, K, N = 32, 256, 256


def left(function: Any, *values: Tensor, context: Context = EVENTS, per_step: tuple[int, ...] = ()) -> Counter[str]:
    """The operations of a function of spikes and weights, whose results the pass is seen to keep."""
    graph = traced(function, list(values), 0)
    for number in per_step:
        graph.graph.find_nodes(op="placeholder")[number].meta["per_step"] = True
    found = run_on_half(("event-products",), graph, context)
    expected = function(*values)
    for one, other in zip(found(*values), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    return kinds(found.graph)


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_spikes_are_gathered_and_scattered() -> None:
    def half(v: Tensor, w: Tensor, bias: Tensor, g: Tensor) -> Any:
        z = (v > 1).double()
        return z @ w, torch.addmm(bias, 0.7 * z, w), g.T @ z, z.T @ g

    kept = left(half, weights(M, K), weights(K, N), weights(N), weights(M, N))
    assert kept["event_product"] == kept["event_outer"] == 2
    assert kept["mm"] + kept["addmm"] == 0
    assert kept["event_rows"] == 0  # the weight is laid out by rows


def test_a_weight_is_turned_once() -> None:
    def half(v: Tensor, w: Tensor) -> Any:
        z = (v > 1).double()
        y = torch.where(z @ w.T > 0, 1.0, 0.0).double() @ w.T
        return (y,)

    kept = left(half, weights(M, K), weights(K, K))
    assert kept["event_product"] == 2
    assert kept["event_rows"] == 1


def test_ternary_spikes_and_packed_spikes_are_known() -> None:
    def half(v: Tensor, word: Tensor, w: Tensor) -> Any:
        ternary = (v > 1).double() - (v < -1).double()
        unpacked = torch.bitwise_and(torch.bitwise_right_shift(word, 3), 1).double()
        return ternary @ w, unpacked @ w

    word = torch.randint(256, (M, K), dtype=torch.int32)
    assert left(half, weights(M, K), word, weights(K, N))["event_product"] == 2


def test_what_is_dense_or_small_is_left() -> None:
    def half(v: Tensor, w: Tensor, few: Tensor) -> Any:
        z = (v > 1).double()
        return v @ w, torch.tanh(v) @ w, z @ few, w @ z.T, (z + v) @ w

    kept = left(half, weights(M, K), weights(K, N), weights(K, 2))
    assert kept["mm"] == 5


def test_what_is_too_small_is_told() -> None:
    """Products of spikes alone, and none where no product is done by events."""

    def half(v: Tensor, few: Tensor, w: Tensor) -> Any:
        z = (v > 1).double()
        return z @ few, v @ few, z @ w

    graph = traced(half, [weights(M, K), weights(K, 2), weights(K, N)], 0)
    assert too_small(graph, EVENTS) == [(M, K, 2)]
    assert too_small(graph, CONTEXT) == []
    line = Rewrite("event-products", 0, calls=(9, 9), small=((M, K, 2),)).describe()
    assert line.endswith("products of spikes are too small to gain (32 x 256 with 256 x 2)")


def test_inputs_are_looked_at_where_that_is_cheap() -> None:
    def half(x: Tensor, many: Tensor, w: Tensor) -> Any:
        return x @ w, many.reshape(-1, K) @ w

    kept = left(half, weights(M, K), weights(8, M, K), weights(K, N), per_step=(0, 1))
    assert (kept["mm"], kept["event_product"]) == (1, 1)


def test_a_carry_is_known_by_its_facts() -> None:
    def half(z: Tensor, w: Tensor) -> Any:
        return (z @ w,)

    graph = traced(half, [weights(M, K), weights(K, N)], 1)
    graph.graph.find_nodes(op="placeholder")[0].meta["carry"] = 0
    known = replace(EVENTS, facts=(bits(torch.float64),))
    assert kinds(run_on_half(("event-products",), graph, EVENTS).graph)["event_product"] == 0
    assert kinds(run_on_half(("event-products",), graph, known).graph)["event_product"] == 1


def test_nothing_is_done_uncompiled() -> None:
    def half(v: Tensor, w: Tensor) -> Any:
        return ((v > 1).double() @ w,)

    assert left(half, weights(M, K), weights(K, N), context=CONTEXT)["mm"] == 1


def test_a_bias_of_one_element_is_no_bias_of_a_row() -> None:
    def half(v: Tensor, w: Tensor, one: Tensor, row: Tensor) -> Any:
        z = (v > 1).double()
        return torch.addmm(one, z, w), torch.addmm(row, z, w)

    kept = left(half, weights(M, K), weights(K, N), weights(1), weights(1, N))
    assert (kept["addmm"], kept["event_product"]) == (2, 0)


def test_what_a_forward_gives_keeps_its_layout() -> None:
    def half(v: Tensor, a: Tensor, *tangents: Tensor) -> Any:
        z = (v > 1).double()
        return a.t() @ z, *(2 * each for each in tangents)

    values = [weights(M, K), weights(M, N), weights(1)]
    for number, kept in ((2, False), (3, True)):
        graph = traced(half, values[:number], 0)
        for node in graph.graph.find_nodes(op="placeholder")[2:]:
            node.target = node.name = "tangents_1"
        made = run_on_half(("event-products",), graph, EVENTS)
        assert kinds(made.graph)["event_outer"] == 1
        assert made(*values[:number])[0].is_contiguous() != kept  # nobody minds how a gradient lies


def test_memory_that_is_read_as_it_lies_is_left() -> None:
    def half(v: Tensor, a: Tensor) -> Any:
        return (torch.as_strided(a.t() @ (v > 1).double(), (190,), (193,), 1),)

    assert left(half, weights(M, K), weights(M, N))["mm"] == 1


class FastWeights(nn.Module):
    """Weights that grow where activity meets spikes (Hebb): the product of both is kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.spiking, self.active = nn.Linear(20, 192), nn.Linear(20, 224)

    def forward(self, x_TBI: Tensor) -> Tensor:
        v, grown = x_TBI.new_zeros(x_TBI.shape[1], 192), x_TBI.new_zeros(224, 192)
        for t in range(x_TBI.shape[0]):
            v = 0.8 * v + self.spiking(x_TBI[t])
            z: Any = Spike.apply(v - 0.5)  # type: ignore[no-untyped-call]
            met = torch.tanh(self.active(x_TBI[t])).t() @ z
            grown = 0.9 * grown + torch.tanh(met) * met
        return grown


class Layers(nn.Module):
    """Leaky neurons that excite a second population, whose spikes are +1, 0 and -1, and scaled by a learned gain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(40, 224), nn.Linear(224, 192), nn.Linear(192, 5)
        self.back, self.gain = nn.Linear(192, 224, bias=False), nn.Parameter(torch.tensor(0.8))

    def forward(self, x_TBI: Tensor) -> Tensor:
        u, v, y = (x_TBI.new_zeros(x_TBI.shape[1], n) for n in (224, 192, 192))
        total = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for t in range(x_TBI.shape[0]):
            u = 0.9 * u + self.first(x_TBI[t]) + self.back(self.gain * y)
            z: Any = Spike.apply(u - 0.4)  # type: ignore[no-untyped-call]
            u, v = u - 0.4 * z, 0.8 * v + self.second(z)
            y = Spike.apply(v - 0.3) - Spike.apply(-v - 0.3)  # type: ignore[no-untyped-call]
            total = total + self.out(y)
        return total


def gradients(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    call(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        pytest.param(32, {"segment": 3}, marks=pytest.mark.campaign),
        (47, {"schedule": "standard", "verify": True, "segment": 2}),
    ],
)
def test_gradients_are_those_of_eager(batch: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Layers().double()
    x = spikes(21, batch, 40).double()
    compiled = reroll.compile(model, lowering="inductor", **options)
    for found, expected in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))
    seen = {(line.kind, line.k, line.n): line for line in reroll.explain(compiled, x.requires_grad_()).loops[0].events}
    assert set(seen) == {(kind, *sizes) for kind in ("product", "gradient") for sizes in ((224, 192), (192, 224))}
    assert all(0 < line.events < line.elements for line in seen.values())
    assert all(line.calls for line in seen.values())


@pytest.mark.inductor
def test_products_that_are_kept_for_the_backward() -> None:
    torch.manual_seed(0)
    model, x = FastWeights().double(), torch.randn(19, 32, 20, dtype=torch.float64)
    compiled = reroll.compile(model, lowering="inductor", segment=2)
    for found, expected in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))
    (line,) = reroll.explain(compiled, x.requires_grad_()).loops[0].events
    assert (line.kind, line.weight) == ("product", "")
    assert line.calls >= 18


@pytest.mark.inductor
def test_the_pass_can_be_left_out_and_eager_does_without() -> None:
    model, x = RecurrentLIF(8, 192, 3).double(), spikes(20, 32, 8).double()
    passes = tuple(name for name in reroll.DEFAULT_PASSES if name != "event-products")
    for options in ({"passes": passes}, {"lowering": "eager"}):
        compiled = reroll.compile(model, segment=2, **options)
        compiled(x).sum().backward()
        assert reroll.explain(compiled, x).loops[0].events == ()
