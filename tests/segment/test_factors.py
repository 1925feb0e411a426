"""Gradients that are products are formed where they are added up, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from halves import kinds, traced, weights
from reroll.planning.options import Lowering
from reroll.segment.factors import defer_products, handing_over


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
    compiled = reroll.compile(model, lowering=lowering, schedule=schedule, segment=3)
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

    compiled = reroll.compile(loop, lowering="eager", schedule="standard")
    compiled(x).backward()
    with torch.profiler.profile(record_shapes=True) as profile:
        compiled(x).backward()
    formed = [e for e in profile.events() if e.name == "aten::addmm_" and e.input_shapes[0] == [300, 300]]
    alone = [e for e in profile.events() if e.name == "aten::mm" and e.input_shapes[0][0] == 300]
    assert len(formed) > 5
    assert len(alone) <= 3


KERNELS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "two dimensions": ((2, 5, 3, 3), (60, 5, 3, 3), {"padding": 1}),
    "strides, and padding of one side": ((2, 5, 4, 3), (60, 5, 3, 1), {"stride": (2, 1), "padding": (1, 0)}),
    "one dimension": ((3, 4, 5), (40, 4, 2), {}),
    "three dimensions": ((1, 3, 2, 3, 2), (64, 3, 2, 2, 1), {"padding": (0, 1, 0)}),
    "points": ((2, 6, 3, 3), (50, 6, 1, 1), {"stride": 2}),
}


def kernel_gradients(image: tuple[int, ...], kernel: tuple[int, ...], given: dict[str, Any]) -> Any:
    """The gradients of an image and of a kernel as a graph, and their operands."""
    convolution = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[len(image) - 3]
    x, w = (each.double() for each in weights(image, kernel))
    g = torch.randn_like(convolution(x, w, **given))

    def half(g: Tensor, x: Tensor, w: Tensor) -> Any:
        x, w = x.requires_grad_(), w.requires_grad_()
        return torch.autograd.grad(convolution(x, w, **given), (x, w), g)

    return half, [g, x, w]


@pytest.mark.parametrize("case", KERNELS)
def test_the_gradient_of_a_kernel_is_a_product_of_its_few_windows(case: str) -> None:
    half, values = kernel_gradients(*KERNELS[case])
    made = traced(half, values, 1)
    products = defer_products(made, [False, True])
    found = list(made(*values))
    (convolution,) = made.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    assert convolution.args[-1] == [True, False, False]
    expected = half(*values)
    zeros = products[1].zeros(values[2].detach())
    for total in (zeros, torch.randn_like(expected[1].transpose(0, -1)).transpose(0, -1)):  # laid out otherwise, too
        before = total.clone()
        products[1].add_to(total, found[products[1].left], found[products[1].right])
        torch.testing.assert_close(total - before, expected[1], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize(
    ("image", "kernel", "given"),
    [
        ((2, 5, 3, 3), (35, 5, 3, 3), {"padding": 1}),  # 18 windows, 35 channels
        ((2, 6, 3, 3), (60, 3, 3, 3), {"padding": 1, "groups": 2}),
        ((2, 6, 5, 5), (60, 6, 3, 3), {"padding": 1, "dilation": 2}),
    ],
)
def test_other_kernels_are_left_to_torch(image: Any, kernel: Any, given: Any) -> None:
    half, values = kernel_gradients(image, kernel, given)
    assert defer_products(traced(half, values, 1), [False, True]) == {}


class Taken:
    """What was handed over, and when."""

    def __init__(self) -> None:
        self.own, self.grads = dict[int, bool](), dict[int, Tensor]()

    def take(self, number: int, grad: Tensor, own: bool) -> None:
        self.own[number], self.grads[number] = own, grad.clone()
        if own:
            grad.fill_(float("nan"))

    def multiply(self, number: int, left: Tensor, right: Tensor) -> None:
        self.grads[-1 - number] = left @ right


def test_gradients_are_handed_over_where_they_are_made() -> None:
    """What is taken may be written to: nothing else reads it then, in the graph or behind it."""

    def half(x: Tensor, g: Tensor) -> Any:
        fresh, read, twice = x * 2, x * 6, x * 7
        view, part, wide = (x * 4).t(), (x * 5)[:2], x.sum(0).expand(5, 4)
        later = read * 3
        same = torch.ops.aten.conj_physical(x)  # is x
        return fresh, read, twice, twice, view, part, wide, x, x.T @ g, later, same, g.sum(0)

    values = weights((5, 4), (5, 3))
    made = traced(half, values, 0)
    expected = half(*values)
    products = defer_products(made, [number == 8 for number in range(12)])
    handed = handing_over(made, [True] * 11 + [False], products)
    taken = Taken()
    found = handed(*values, taken)
    assert [number for number, own in taken.own.items() if own] == [0, 4, 9]
    torch.testing.assert_close(taken.grads.pop(-1), expected[8])
    for number, grad in taken.grads.items():
        torch.testing.assert_close(grad, expected[number])
    assert list(found[:11]) == [None] * 11
    torch.testing.assert_close(found[11], expected[11])
    calls = [str(node.target) for node in handed.graph.nodes if node.op == "call_function"]
    assert "_take" in calls[calls.index("aten.mul.Tensor") + 1]


class Wide(nn.Module):
    """A step with a convolution of many windows, one of few, and products: each weight has 36 to 147 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def forward(self, x_TBN: Tensor) -> Tensor:
        h_BN = torch.zeros_like(x_TBN[0])
        for x_BN in x_TBN:
            h_BN = torch.tanh(h_BN + x_BN)
            for layer in self.layers:
                h_BN = torch.tanh(layer(h_BN))
            h_BN = h_BN + self.many(h_BN.view(-1, 32, 2, 2)).flatten(1) + self.few(h_BN.view(-1, 64, 2, 1)).flatten(1)
        return h_BN.square().sum()


@pytest.mark.parametrize("given", [{"segment": 1}, {"segment": 2}, {"schedule": "standard"}], ids=str)
def test_no_second_copy_of_the_parameters_is_held(given: dict[str, Any]) -> None:
    """Beside the gradients at most one weight's, in the two copies that a convolution works in."""
    model, x = Wide(), torch.randn(6, 2, 128)
    whole = sum(each.nbytes for each in model.parameters())
    compiled = reroll.compile(model, lowering="eager", **given)

    def step(run: Any) -> None:
        model.zero_grad()
        run(x).backward()

    step(model)
    expected = [each.grad for each in model.parameters()]
    step(compiled)
    for each, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(each.grad, grad, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    peak = reroll.measure(lambda: step(compiled), [model]).local_peak
    assert whole > 500_000
    assert peak < 220_000
    assert peak == pytest.approx(reroll.explain(compiled, x).predicted_peak, rel=0.05)


def twice(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a loss that is reversed twice, beside those of before, and which hooks change."""
    hook = next(model.parameters()).register_hook(lambda grad: grad * 2)
    loss = run(x)
    loss.backward(retain_graph=True)
    loss.backward()
    hook.remove()
    return [torch.zeros(()) if each.grad is None else each.grad.clone() for each in model.parameters()]


def test_sums_that_were_gradients_of_a_segment_are_added_up_by_autograd_as_ever() -> None:
    model, x = Wide().double(), torch.randn(5, 2, 128, dtype=torch.float64)
    compiled = reroll.compile(model, lowering="eager", segment=2)
    expected, found = [], []
    for _ in range(2):  # the second time .grad is there already
        expected = twice(model, model, x)
    model.zero_grad()
    for _ in range(2):
        found = twice(compiled, model, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
