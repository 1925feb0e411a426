"""Torch's cells in their parts: those that it runs fused on a card, and those that update their gates on a CPU.

``torch.lstm_cell`` and ``torch.gru_cell`` are products and activations on a CPU, but one kernel behind the products on
a card, which inductor would call as it is, and whose shapes fake tensors do not know (that of GRUs, up to torch 2.13).
The formulas are those of ``aten/src/ATen/native/cuda/RNN.cu``: the same sums in the same order.

On a CPU a cell updates its gates in place, and a graph of that has to be made functional, which takes longer than all
else of a trace. ``WithoutUpdates`` runs the formulas of ``aten/src/ATen/native/RNN.cpp`` on new values: the same bits.

Shapes: B batch, H hidden values, G gates: 4 H of an LSTM, 3 H of a GRU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
Bias = Tensor | None


def lstm_cell(
    x_gates_BG: Tensor, h_gates_BG: Tensor, c_BH: Tensor, x_bias_G: Bias = None, h_bias_G: Bias = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``h'``, ``c'``, and the activated gates, which the gradient reads."""
    gates_BG = x_gates_BG + h_gates_BG
    if x_bias_G is not None and h_bias_G is not None:
        gates_BG = gates_BG + x_bias_G + h_bias_G
    i, f, g, o = gates_BG.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_next_BH = f * c_BH + i * g
    return o * c_next_BH.tanh(), c_next_BH, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(
    grad_h_BH: Tensor | None, grad_c_BH: Tensor | None, c_BH: Tensor, c_next_BH: Tensor, kept_BG: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the gates, of ``c``, and of a bias. ``kept_BG``: the activated gates."""
    i, f, g, o = kept_BG.chunk(4, 1)
    squashed_BH = c_next_BH.tanh()
    grad_o = torch.zeros_like(o)
    into_c_BH = torch.zeros_like(c_BH) if grad_c_BH is None else grad_c_BH
    if grad_h_BH is not None:
        grad_o = grad_h_BH * squashed_BH * (1 - o) * o
        into_c_BH = into_c_BH + grad_h_BH * o * (1 - squashed_BH * squashed_BH)
    grad_i, grad_f = into_c_BH * g * (1 - i) * i, into_c_BH * c_BH * (1 - f) * f
    grads_BG = torch.cat((grad_i, grad_f, into_c_BH * i * (1 - g * g), grad_o), 1)
    return grads_BG, into_c_BH * f, grads_BG.sum(0) if biased else None


def gru_cell(
    x_gates_BG: Tensor, h_gates_BG: Tensor, h_BH: Tensor, x_bias_G: Bias = None, h_bias_G: Bias = None
) -> tuple[Tensor, Tensor]:
    """``h'``, and what the gradient reads, (B, 5 H)."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x_gates_BG.chunk(3, 1), h_gates_BG.chunk(3, 1)
    r, z = x_r + h_r, x_z + h_z
    if x_bias_G is not None and h_bias_G is not None:
        (b_r, b_z, b_n), (c_r, c_z, c_n) = x_bias_G.chunk(3), h_bias_G.chunk(3)
        r, z, x_n, h_n = r + b_r + c_r, z + b_z + c_z, x_n + b_n, h_n + c_n
    r, z = r.sigmoid(), z.sigmoid()
    n = (x_n + r * h_n).tanh()
    return n + z * (h_BH - n), torch.cat((r, z, n, h_BH, h_n), 1)


def gru_cell_backward(
    grad_BH: Tensor, kept: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the gates of the input and of the state, of ``h``, and of both biases. ``kept``: (B, 5 H)."""
    r, z, n, h_BH, h_n = kept.chunk(5, 1)
    grad_z = grad_BH * (h_BH - n) * (1 - z) * z
    grad_n = grad_BH * (1 - z) * (1 - n * n)
    grad_r = grad_n * h_n * (1 - r) * r
    of_x_BG, of_h_BG = torch.cat((grad_r, grad_z, grad_n), 1), torch.cat((grad_r, grad_z, grad_n * r), 1)
    return of_x_BG, of_h_BG, grad_BH * z, of_x_BG.sum(0) if biased else None, of_h_BG.sum(0) if biased else None


PARTS: Mapping[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
"""What each of them does, for ``make_fx``."""


def _gru(x_BI: Tensor, h_BH: Tensor, w_x: Tensor, w_h: Tensor, b_x: Bias = None, b_h: Bias = None) -> Tensor:
    x_r, x_z, x_n = linear(x_BI, w_x, b_x).chunk(3, 1)
    h_r, h_z, h_n = linear(h_BH, w_h, b_h).chunk(3, 1)
    r, z = (h_r + x_r).sigmoid(), (h_z + x_z).sigmoid()
    n = (x_n + h_n.clone() * r).tanh()  # a backward reads that third, and is not to keep all
    return (h_BH - n) * z + n


def _lstm(
    x_BI: Tensor, state: Sequence[Tensor], w_x: Tensor, w_h: Tensor, b_x: Bias = None, b_h: Bias = None
) -> tuple[Tensor, Tensor]:
    h_BH, c_BH = state
    i, f, g, o = (linear(h_BH, w_h, b_h) + linear(x_BI, w_x, b_x)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_next_BH = f * c_BH + i * g
    return o * c_next_BH.tanh(), c_next_BH


def _gates(x_BI: Tensor, h_BH: Tensor, w_x: Tensor, w_h: Tensor, b_x: Bias = None, b_h: Bias = None) -> Tensor:
    return linear(h_BH, w_h, b_h) + linear(x_BI, w_x, b_x)


_CELLS: Mapping[Any, Callable[..., Any]] = {
    torch.gru_cell: _gru,
    torch.lstm_cell: _lstm,
    torch.rnn_tanh_cell: lambda *args, **kwargs: _gates(*args, **kwargs).tanh(),
    torch.rnn_relu_cell: lambda *args, **kwargs: _gates(*args, **kwargs).relu(),
}


class WithoutUpdates(TorchFunctionMode):
    """Inside, cells on a CPU update nothing in place; under autocast they are torch's, which says what is rounded."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = func not in _CELLS or args[0].device.type != "cpu" or torch.is_autocast_enabled("cpu")
        return (func if plain else _CELLS[func])(*args, **(kwargs or {}))
