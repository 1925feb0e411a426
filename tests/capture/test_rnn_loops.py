"""nn.RNN, nn.GRU and nn.LSTM in larger networks, called on one step in a loop, or in chunks; their cells in loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
import reroll.backends.construct.kernels as build
from rnns import DOUBLE, B, H, I, Model, P, T, check, needs_final_states_of_lstm, sequence, state

pytestmark = pytest.mark.usefixtures("double_precision", "rnn_layers")


def twice(s: Model, x: Tensor) -> Any:
    first, h = s.rnn(x)
    return first + s.rnn(x.flip(0), h)[0]


def chunks(s: Model, x: Tensor) -> Any:
    h, outputs = None, []
    for chunk in x.split(3):
        y, h = s.rnn(chunk, h)
        h = h.detach()
        outputs.append(y)
    return torch.cat(outputs), h


def then_a_loop(s: Model, x: Tensor) -> Any:
    y, h = s.rnn(x)[0], x.new_zeros(B, H)
    for t in range(x.shape[0]):
        h = torch.tanh(y[t] + s.r(h))
    return h


def after_a_loop(s: Model, x: Tensor) -> Any:
    h, rows = x.new_zeros(B, H), []
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h))
        rows.append(h[:, :I])
    return s.rnn(torch.stack(rows))


def in_place(s: Model, x: Tensor) -> Any:
    h0, y = torch.zeros(2, B, H), x * 2
    h0 += 1
    y[0] = 0
    out, h = s.rnn(y, h0)
    out.mul_(2)
    h += 1
    return out, h, h0, y


def half_without_gradients(s: Model, x: Tensor) -> Any:
    with torch.no_grad():
        y, h = s.rnn(x)
    return s.r(y) + s.rnn(x)[0], h


USES = {
    twice: ((9, 1),) * 4,
    chunks: ((3, 1),) * 6,
    then_a_loop: ((9, 1),) * 3,
    after_a_loop: ((9, 1),) * 3,
    in_place: ((9, 1),) * 2,
    half_without_gradients: ((9, 1),) * 4,
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("network", USES, ids=lambda network: network.__name__)
def test_in_a_larger_network(network: Callable[..., Any]) -> None:
    assert check(Model(network), sequence(), codec="none") == USES[network]


def one_by_one(s: Model, x: Tensor) -> Any:
    h, rows = None, []
    for t in range(x.shape[0]):
        y, h = s.rnn(x[t : t + 1], h)
        rows.append(y)
    return torch.cat(rows), h


def one_by_one_batch_first(s: Model, x: Tensor, *states: Tensor) -> Any:
    rows, h = [], states if len(states) > 1 else states[0]
    for t in range(x.shape[1]):
        y, h = s.rnn(x[:, t].unsqueeze(1), h)
        rows.append(y[:, 0])
    return torch.stack(rows, 1), h


@pytest.mark.parametrize(
    ("rnn", "found"),
    [
        (lambda: nn.RNN(I, H, nonlinearity="relu"), (9, 1)),
        (lambda: nn.GRU(I, H, 2), (9, 1)),
        (lambda: nn.LSTM(I, H, 2, dropout=0.3), (9, 2)),
        (lambda: nn.LSTM(I, H, proj_size=P), (9, 2)),
    ],
)
def test_called_on_one_step_in_a_loop(rnn: Callable[[], nn.Module], found: tuple[int, int]) -> None:
    if isinstance(rnn(), nn.LSTM):
        needs_final_states_of_lstm()
    assert check(Model(one_by_one, rnn()), sequence()) == (found,)


def test_called_on_one_step_in_a_loop_with_given_states() -> None:
    needs_final_states_of_lstm()
    model = Model(one_by_one_batch_first, nn.LSTM(I, H, batch_first=True))
    assert check(model, torch.randn(B, T, I), state(1), state(1), **DOUBLE) == ((9, 2),)


def cells(s: Model, x: Tensor) -> Any:
    h: Any = (x.new_zeros(B, H),) * 2 if isinstance(s.rnn, nn.LSTMCell) else x.new_zeros(B, H)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
    return h


@pytest.mark.parametrize(("cell", "carries"), [(nn.RNNCell, 1), (nn.GRUCell, 1), (nn.LSTMCell, 2)])
def test_cells_in_loops(cell: Callable[..., nn.Module], carries: int) -> None:
    assert check(Model(cells, cell(I, H)), sequence()) == ((9, carries),)


def test_equal_chunks_share_their_kernels() -> None:
    made, inner = [], build.compile_kernels

    def count(*given: Any) -> Any:
        made.append(inner(*given))
        return made[-1]

    with mock.patch.object(build, "compile_kernels", count):
        assert check(Model(chunks, nn.GRU(I, H)), sequence(12)) == ((3, 1),) * 4
    assert len(made) == 1
    with mock.patch.object(build, "compile_kernels", count):
        check(Model(chunks, nn.GRU(I, H)), sequence(10))  # the last chunk has one step, and is no loop
        check(Model(chunks, nn.GRU(I, H)), sequence(11))
    assert len(made) == 3  # a chunk of two steps has the segments of those of three


class Cells(nn.Module):
    """Layers of cells of which nobody reads the last one's second state."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(I, I) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        states = [(x.new_zeros(x.shape[1], I), x.new_zeros(x.shape[1], I)) for _ in self.cells]
        value = x[0]
        for t in range(x.shape[0]):
            value = x[t]
            for number, cell in enumerate(self.cells):
                states[number] = cell(value, states[number])
                value = states[number][0]
        return value


@pytest.mark.parametrize("layers", [1, 2])
def test_a_state_that_nobody_reads_at_last_leaves_the_last_step_in_the_loop(layers: int) -> None:
    model, x = Cells(layers), torch.randn(12, 3, I, requires_grad=True)
    for run in (
        reroll.compile(model, lowering="eager"),
        torch.compile(model, backend="reroll", options={"lowering": "eager"}),
    ):
        found, expected = (torch.autograd.grad(each(x).sum(), [x, *model.parameters()]) for each in (run, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert [loop.choice.steps for loop in reroll.explain(run, x).loops] == [12]
