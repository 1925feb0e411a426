"""Networks of torch's own recurrent layers, as its documentation writes them. T time, B batch, I inputs, H neurons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training import Case

I, H = 3, 4  # noqa: E741


class Cell(nn.Module):
    """The loop of the documentation of ``nn.RNNCell``, ``nn.GRUCell`` and ``nn.LSTMCell``."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.rnn, self.out = cell, nn.Linear(H, 2)

    def forward(self, input: Tensor, hx: Tensor, *cx: Tensor) -> Any:  # noqa: A002
        state: Any = (hx, *cx) if cx else hx
        output = []
        for i in range(input.size()[0]):
            state = self.rnn(input[i], state)
            output.append(state[0] if cx else state)
        return self.out(torch.stack(output, dim=0)), state


class Layer(nn.Module):
    """A recurrent layer with a readout; all that the layer gives is an output."""

    def __init__(self, kind: type[nn.RNN | nn.GRU | nn.LSTM], **options: Any) -> None:
        super().__init__()
        self.layer = kind(I, H, **options)
        width = options.get("proj_size", H) * (1 + options.get("bidirectional", False))
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        given = (tuple(state) if len(state) > 1 else state[0]) if state else None
        y, last = self.layer(x, given)
        return self.out(y), last


def cell(kind: type[nn.Module], states: int = 1, **options: Any) -> Case:
    def inputs(steps: int) -> tuple[Tensor, ...]:
        return torch.randn(steps, 2, I), *(torch.randn(2, H) for _ in range(states))

    return Case(lambda: Cell(kind(I, H, **options)), inputs, loops=(9,))


def layer(kind: type[nn.RNN | nn.GRU | nn.LSTM], loops: int, states: tuple[int, ...] = (), **options: Any) -> Case:
    """``states``: the widths of initial states, if they are given."""
    time = 1 if options.get("batch_first") else 0
    rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))

    def inputs(steps: int) -> tuple[Tensor, ...]:
        x = torch.randn(2, steps, I) if time else torch.randn(steps, 2, I)
        return x, *(torch.randn(rows, 2, width) for width in states)

    return Case(
        lambda: Layer(kind, **options),
        inputs,
        loops=(9,) * loops,
        time=time,
        settings={"allow_rnn": True},
    )


CELLS = {
    "rnn_cell": cell(nn.RNNCell),
    "rnn_cell_relu": cell(nn.RNNCell, nonlinearity="relu"),
    "gru_cell": cell(nn.GRUCell),
    "lstm_cell": cell(nn.LSTMCell, states=2),
}
LAYERS = {
    "rnn_tanh": layer(nn.RNN, 1),
    "rnn_relu": layer(nn.RNN, 4, nonlinearity="relu", num_layers=2, bidirectional=True, batch_first=True),
    "gru": layer(nn.GRU, 1),
    "gru_without_bias": layer(nn.GRU, 2, (H,), bias=False, bidirectional=True),
    "gru_dropout": layer(nn.GRU, 2, num_layers=2, dropout=0.4),
    "lstm": layer(nn.LSTM, 1),
    "lstm_deep": layer(nn.LSTM, 4, (H, H), num_layers=2, bidirectional=True, batch_first=True),
    "lstm_projection": layer(nn.LSTM, 2, (2, H), proj_size=2, num_layers=2, dropout=0.2),
}
CASES = CELLS | LAYERS
