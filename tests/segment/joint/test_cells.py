"""The fused cells of a card in their parts: values and gradients are those of torch's cells on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.segment.joint.cells import PARTS, WithoutUpdates

B, I, H = 3, 4, 5  # noqa: E741
Cell = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


def gates(x_BI: Tensor, h_BH: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return x_BI @ weights[0].t(), h_BH @ weights[1].t()


def fused_lstm(x_BI: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = torch.ops.aten._thnn_fused_lstm_cell(*gates(x_BI, state[0], weights), state[1], *weights[2:])
    return tuple(found[:2])


def fused_gru(x_BI: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.ops.aten._thnn_fused_gru_cell(*gates(x_BI, state[0], weights), state[0], *weights[2:])[0],)


CELLS: dict[str, tuple[Cell, Cell, int, int]] = {
    "lstm": (fused_lstm, lambda x, state, weights: torch.lstm_cell(x, tuple(state), *weights), 4, 2),
    "gru": (fused_gru, lambda x, state, weights: (torch.gru_cell(x, state[0], *weights),), 3, 1),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", CELLS)
def test_fused_cells_in_parts_are_the_cells(
    name: str, read: tuple[int, ...], biased: bool, double_precision: None
) -> None:
    fused, plain, count, states = CELLS[name]
    sizes = [(count * H, I), (count * H, H), *([(count * H,)] * 2 if biased else [])]
    values = [torch.randn(size) for size in [(B, I), *[(B, H)] * states, *sizes]]

    def trained(cell: Cell) -> Callable[..., tuple[Tensor, ...]]:
        def run(*values: Tensor) -> tuple[Tensor, ...]:
            leaves = [value.detach().requires_grad_() for value in values]
            results = cell(leaves[0], leaves[1 : 1 + states], leaves[1 + states :])
            chosen = [results[number % len(results)] for number in read]
            total: Any = sum((value * value).sum() for value in chosen)
            return (*results, *torch.autograd.grad(total, leaves))

        return run

    graph = make_fx(trained(fused), decomposition_table=PARTS)(*values)
    assert not any("_thnn" in str(node.target) for node in graph.graph.nodes)
    for found, expected in zip(graph(*values), trained(plain)(*values), strict=True):
        torch.testing.assert_close(found, expected)


CPU: dict[str, tuple[Any, int, int]] = {
    "gru": (torch.gru_cell, 3, 1),
    "lstm": (torch.lstm_cell, 4, 2),
    "tanh": (torch.rnn_tanh_cell, 1, 1),
    "relu": (torch.rnn_relu_cell, 1, 1),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", CPU)
def test_cells_without_updates_have_the_bits_of_torchs(name: str, biased: bool) -> None:
    cell, count, states = CPU[name]
    sizes = [(count * H, I), (count * H, H), *([(count * H,)] * 2 if biased else [])]
    values = [torch.randn(size) for size in [(B, I), *[(B, H)] * states, *sizes]]

    def trained(*values: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in values]
        state: Any = leaves[1 : 1 + states]
        results = cell(leaves[0], state if states > 1 else state[0], *leaves[1 + states :])
        results = results if states > 1 else (results,)
        return (*results, *torch.autograd.grad(sum(each.square().sum() for each in results), leaves))

    expected = trained(*values)
    with WithoutUpdates():
        found, graph = trained(*values), make_fx(trained)(*values)
    assert all(map(torch.equal, found, expected))
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert not any("_." in str(target) for target in called)


def test_under_autocast_cells_are_torchs() -> None:
    values = [torch.randn(size) for size in [(B, I), (B, H), (3 * H, I), (3 * H, H)]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.gru_cell(*values)
        with WithoutUpdates():
            assert torch.equal(torch.gru_cell(*values), expected)
