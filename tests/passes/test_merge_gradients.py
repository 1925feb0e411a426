"""Weight gradients of a segment: one product, wherever sums are over steps, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from halves import BOTH, B, Function, H, N, T, backward_of, rewritten, weights

pytestmark = pytest.mark.usefixtures("double_precision")


def states(cell: Function, x_TBI: Tensor, h_BH: Tensor) -> list[Tensor]:
    found = []
    for x_BI in x_TBI.unbind():
        h_BH = cell(x_BI, h_BH)
        found.append(h_BH)
    return found


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
    assert left["convolution_backward"] == (T - 1) + 1  # for the state; for the kernel and the bias
    assert left["embedding_dense_backward"] == 1


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2}, {"dilation": 2, "groups": 2, "padding": 2}])
def test_gradients_to_inputs_of_a_second_convolution_are_one(options: dict[str, Any]) -> None:
    groups = options.get("groups", 1)

    def loss(x: Tensor, u: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        total = torch.zeros(())
        for t in range(T):
            u = torch.tanh(0.5 * u + F.conv2d(x[t], first, bias, padding=1))
            total = total + F.conv2d(u, second, **options).square().sum()
        return total

    values = weights((T, B, 2, 5, 5), (B, 4, 5, 5), (4, 2, 3, 3), (4,), (6, 4 // groups, 3, 3))
    left = rewritten(backward_of(loss, 3), values, 3)
    assert left["convolution_backward"] == 3  # both kernels, and to the inputs of the second


def test_a_transposed_convolution_is_turned_back_together() -> None:
    def loss(x: Tensor, u: Tensor, first: Tensor, second: Tensor) -> Tensor:
        total = torch.zeros(())
        for t in range(T):
            u = torch.tanh(u + x[t] * first)
            total = total + F.conv_transpose1d(u, second, stride=2, output_padding=1).square().sum()
        return total

    values = weights((T, B, 3, 5), (B, 3, 5), (3, 5), (3, 2, 4))
    assert rewritten(backward_of(loss, 2), values, 2)["convolution_backward"] == 2


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
