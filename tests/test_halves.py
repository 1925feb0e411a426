"""Rewrites of a segment's graphs: the same results but for rounding, with as few products as the loop allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import reroll.stacking
from networks import RecurrentLIF, Spike, spikes
from reroll.backends.lowering import _cut, _halves, prepare, replays
from reroll.backends.tracing import Traced, trace
from reroll.context import Context
from reroll.editing import deduplicate
from reroll.errors import PassError
from reroll.registry import register_pass, run_on_half
from reroll.schedule import Interval
from test_lowering import captured

T, B, N, H = 5, 3, 4, 6
CONTEXT = Context(Interval(0, 1, "local"))
BOTH = ("merge-gradients", "batch-products")
Function = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("double_precision")


def traced(function: Function, values: list[Tensor], constants: int) -> fx.GraphModule:
    """The graph of a function whose last ``constants`` arguments are weights."""
    made: fx.GraphModule = make_fx(function, tracing_mode="fake")(*values)
    for node in made.graph.find_nodes(op="placeholder")[len(values) - constants :]:
        node.meta["constant"] = True
    deduplicate(made.graph)
    return made


def rewritten(function: Function, values: list[Tensor], constants: int, passes: tuple[str, ...] = BOTH) -> Counter[str]:
    """How often each operation is left, of a function whose results the passes are seen to keep."""
    expected = function(*values)
    found = run_on_half(passes, traced(function, values, constants), CONTEXT)
    for one, other in zip(found(*values), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return kinds(found.graph)


def kinds(graph: fx.Graph) -> Counter[str]:
    """How often each operation is in a graph."""
    targets: list[Any] = [node.target for node in graph.nodes if node.op == "call_function"]
    return Counter(getattr(target, "overloadpacket", target).__name__ for target in targets)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def states(cell: Function, x_TBI: Tensor, h_BH: Tensor) -> list[Tensor]:
    found = []
    for x_BI in x_TBI.unbind():
        h_BH = cell(x_BI, h_BH)
        found.append(h_BH)
    return found


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


def backward_of(loss: Function, count: int) -> Function:
    """Gradients with respect to the last ``count`` arguments."""

    def half(*values: Tensor) -> Any:
        leaves = [value.detach().requires_grad_() for value in values[-count:]]
        return torch.autograd.grad(loss(*values[:-count], *leaves), leaves)

    return half


def test_the_gradients_of_a_cell_are_one_product_each() -> None:
    def loss(x_TBI: Tensor, h_BH: Tensor, wi: Tensor, bi: Tensor, wr: Tensor) -> Tensor:
        return sum(
            h.square().sum() for h in states(lambda x, h: torch.tanh(torch.addmm(bi, x, wi) + h @ wr), x_TBI, h_BH)
        )  # type: ignore[return-value]

    values = weights((T, B, N), (B, H), (N, H), (H,), (H, H))
    plain, left = (rewritten(backward_of(loss, 3), values, 3, passes) for passes in ((), BOTH))
    forward, through = T, T - 1  # products with wr in the forward, and with its transpose in the backward
    assert plain["mm"] == forward + through + 2 * T
    assert left["mm"] == forward + through + 2
    assert (plain["sum"], left["sum"]) == (T + T, T + 1)  # of the loss, and of the bias


def test_the_gradients_of_kernels_and_tables_are_one_each() -> None:
    def loss(x: Tensor, index: Tensor, h: Tensor, kernel: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        for t in range(T):
            h = torch.tanh(F.conv2d(h + x[t], kernel, bias, padding=1) * F.embedding(index[t], table)[:, None])
        return h.square().sum()

    values = [
        torch.randn(T, B, 1, 5, 5),
        torch.randint(7, (T, B, 5)),
        *weights((B, 1, 5, 5), (1, 1, 3, 3), (1,), (7, 5)),
    ]
    left = rewritten(backward_of(loss, 3), values, 3)
    assert left["convolution_backward"] == (T - 1) + 2  # for the state, the kernel and the bias
    assert left["embedding_dense_backward"] == 1


def test_terms_that_others_read_or_that_come_twice_stay() -> None:
    def half(a: Tensor, b: Tensor) -> Any:
        first, second, third, fourth = (a[t].t() @ b[t] for t in range(4))
        partial = first + second
        twice = a[1].t() @ b[2]
        own = (a[3].t() @ b[0]) + (a[3].t() @ b[1])
        return own + own, partial + third, (twice + (a[2].t() @ b[1])) + twice, fourth + third, first, partial

    assert rewritten(half, weights((4, B, N), (4, B, H)), 0)["mm"] == 8


def test_terms_that_are_no_plain_sums_stay() -> None:
    def half(a: Tensor, b: Tensor, square: Tensor) -> Any:
        scaled = torch.add(a[0].t() @ b[0], a[1].t() @ b[1], alpha=2)
        turned = (a[0].t() @ a[1]) + (a[2].t() @ a[3]).t()
        flipped = square.flip(0, 1) @ a[0].t() + (2 * square).flip(0, 1) @ a[1].t()
        empty = a[0].sum() + a[1].sum(), a[0].sum([]) + a[1].sum([]), a[0, 0, 0].sum(0) + a[1, 0, 0].sum(0)
        broadcast = a[0].sum(0) + b[0, :, 0].sum(0)
        return scaled, turned, flipped, *empty, broadcast

    rewritten(half, weights((4, N, N), (4, N, H), (N, N)), 0)


def test_gradients_of_a_static_image_are_summed() -> None:
    def loss(kernel: Tensor, image: Tensor) -> Tensor:
        return sum(((F.conv2d(image + t, kernel) ** 2).sum() for t in range(3)), torch.zeros(()))

    rewritten(backward_of(loss, 1), weights((2, 1, 3, 3), (B, 1, 5, 5)), 0)


def test_a_static_input_is_multiplied_once() -> None:
    def half(g: Tensor, x: Tensor) -> Any:
        return (g[0].t() @ x + g[1].t() @ x + g[2].t() @ x,)

    assert rewritten(half, weights((3, B, H), (B, N)), 1)["mm"] == 1


def test_gradients_of_tables_that_are_not_sums_over_rows_stay() -> None:
    def loss(index: Tensor, table: Tensor) -> Tensor:
        scaled = [F.embedding(index[t], table, scale_grad_by_freq=True) for t in range(2)]
        single = [F.embedding(index[t, 0], table) * (t + 1) for t in range(2)]
        return sum(((row**2).sum() for row in (*scaled, *single)), torch.zeros(()))

    rewritten(backward_of(loss, 1), [torch.tensor([[1, 1, 2], [1, 3, 3]]), *weights((5, N))], 1)


def test_shared_rows_are_summed_before_the_product() -> None:
    def half(a: Tensor, b: Tensor) -> Any:
        return (a.t() @ b[0] + a.t() @ b[1] + a.t() @ b[2], b[0].t() @ a + b[1].t() @ a)

    left = rewritten(half, weights((B, N), (3, B, H)), 0)
    assert (left["mm"], left["cat"]) == (2, 0)


def test_no_more_is_brought_together_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(x: Tensor, w: Tensor) -> Any:
        return tuple(row @ w for row in x.unbind())

    values = weights((12, B, N), (N, H))
    assert rewritten(half, values, 1)["mm"] == 1
    monkeypatch.setattr(reroll.stacking, "LARGEST", 4 * 8 * B * (N + H))
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


def segment(model: Any, x: Tensor, steps: int) -> Traced:
    found = trace(captured(model.float(), x.float()), steps, decompose=True)
    prepare(found, "inductor")
    return found


def test_spikes_are_replayed_in_products_of_the_whole_segment() -> None:
    found = segment(RecurrentLIF(8, 32, 3), spikes(24, 4, 8), 8)
    assert replays(found, "inductor", "auto")
    cut = _cut(found, pack=True, replay=True)
    assert cut.kept <= 4 * (8 * 32 / 8 + 32 * 4 + 3 * 4)  # spikes of eight steps in bits, and the carry
    _, backward = _halves(found, pack=True, replay=True)
    assert backward is not None
    left = kinds(run_on_half(BOTH, backward, CONTEXT).graph)
    merged, sequential = 3, 7  # gradients of three weights; gradients through the recurrent weight, of a carry each
    assert left["mm"] + left["addmm"] <= merged + sequential + 1 + 3


class TwoPopulations(torch.nn.Module):
    """Excitatory and inhibitory neurons, each driven by the spikes of both, one step and three steps ago."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states, self.late = (
            torch.nn.Linear(N, 2 * H),
            torch.nn.Linear(2 * H, 2 * H),
            torch.nn.Linear(H, H),
        )

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BN = x_TBI.new_zeros(x_TBI.shape[1], 2 * H)
        z_BN, past = v_BN, [v_BN[:, :H]] * 3
        for t in range(x_TBI.shape[0]):
            delayed_BH = self.late(past[-3])
            v_BN = 0.8 * v_BN * (1 - z_BN) + self.inputs(x_TBI[t]) + self.states(z_BN) - F.pad(delayed_BH, (0, H))
            z_BN = Spike.apply(v_BN - 0.3)  # type: ignore[no-untyped-call]
            past = [*past[1:], z_BN[:, H:]]
        return v_BN


def test_the_cut_exists_for_networks_it_was_not_made_for() -> None:
    found = segment(TwoPopulations(), torch.randn(24, B, N), 8)
    cut = _cut(found, pack=True, replay=True)
    assert cut.kept <= 0.1 * cut.plain
    gru = segment(Cell(), torch.randn(24, B, N), 8)
    assert not replays(gru, "inductor", "auto")
    least = _cut(gru, pack=True, replay=True)
    assert 7 * B * H * 4 <= least.kept <= 8 * B * H * 4  # a state a step: the rows of the products
    layers = _cut(segment(Layers(), torch.randn(24, B, N), 8), pack=True, replay=True)
    assert layers.kept <= B * H * 4  # what is outside of the cycle is made again, products and all


class Layers(torch.nn.Module):
    """Two layers without a state, and a leaky sum whose derivative depends on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(N, H), torch.nn.Linear(H, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            v_BH = torch.tanh(0.9 * v_BH + self.second(torch.tanh(self.first(x_TBI[t]))))
        return v_BH


class Cell(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(N, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
        return h_BH
