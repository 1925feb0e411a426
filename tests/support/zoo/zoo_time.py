"""Networks that move through time in their own ways."""

# Written as users write: a name may hold a number, then a tensor.
# mypy: disable-error-code="assignment, no-untyped-call, var-annotated, list-item"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from networks_zoo import SIZE, Net, zeros, zoo


@zoo(found=((9, 1),))
def reversed_time(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in reversed(range(x.shape[0])):
        h = s.rnn(x[t], h)
        o.insert(0, h)
    return torch.stack(o)


@zoo(found=((5, 1),))
def strided(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(0, x.shape[0], 2):
        h = s.rnn(x[t], h)
        o.append(h)
    return torch.stack(o)


@zoo(found=((7, 1),))
def windows(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0] - 2):
        h = s.rnn(x[t : t + 3].mean(0), h)
        o.append(h)
    return torch.stack(o)


@zoo(found=((9, 1),))
def batch_first(s: Net, x: Tensor) -> Any:
    x = x.transpose(0, 1)
    h = x.new_zeros(x.shape[0], SIZE)
    o = []
    for t in range(x.size(1)):
        h = s.rnn(x[:, t, :], h)
        o.append(h)
    return torch.stack(o, dim=1)


@zoo(found=((9, 1),))
def split_ones(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for xt in x.split(1):
        h = s.rnn(xt.squeeze(0), h)
    return h


@zoo(found=((9, 1),))
def chunk_T(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for xt in x.chunk(x.shape[0], 0):
        h = s.rnn(xt[0], h)
    return h


@zoo(found=((9, 1),), inputs=lambda T: (torch.randn(T, 2, SIZE), torch.randn(T, 2, SIZE), torch.rand(2, T)))
def several_inputs(s: Net, x: Tensor, y: Tensor, m: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        n = s.rnn(x[t] + y[t] ** 2, h)
        k = m[:, t, None]
        h = k * n + (1 - k) * h
    return h


@zoo(found=((9, 1),))
def step_weights(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] * s.w[t] + h)
    return h


@zoo(found=((9, 1),))
def irregular(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    T = x.shape[0]
    o = []
    for t in range(T):
        if t == 0:
            h = s.r(h + 1)
        h = s.rnn(x[t], h)
        if t == T - 1:
            h = h * 2 + 1
        o.append(h)
    return torch.stack(o)


@zoo(steps=20, found=((4, 1), (4, 1)))
def detach_every(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
        if t % 4 == 3:
            h = h.detach()
    return torch.stack(o)


@zoo(found=((9, 1),))
def index_tensor_row(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    idx = torch.arange(x.shape[0])
    for t in range(x.shape[0]):
        h = s.rnn(x.index_select(0, idx[t : t + 1])[0], h)
    return h


@zoo(found=((8, 1),))
def warm_state(s: Net, x: Tensor) -> Any:
    h = x[0]
    for t in range(1, x.shape[0]):
        h = torch.tanh(s.r(h) + x[t])
    return h


@zoo(found=((9, 1),))
def where_time(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    T = x.shape[0]
    lens = torch.tensor([T, T // 2])
    for t in range(T):
        n = s.rnn(x[t], h)
        h = torch.where((t < lens)[:, None], n, h)
    return h


@zoo(found=((4, 1),))
def pyint_switch(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h) if t % 2 == 0 else s.rnn2(x[t], h)
    return h


@zoo(found=((3, 1), (6, 1)))
def curriculum(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        if t == 2:
            h = h * 0.5
    return h


@zoo(found=((9, 1),))
def expanded_input(s: Net, x: Tensor) -> Any:
    x = x[:1].expand(x.shape[0], -1, -1)
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
    return h


@zoo(found=((7, 1),))
def big_window(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(s.r(h) + x[max(0, t - 2) : t + 1].sum(0))
    return h


@zoo(found=((4, 1),))
def groups_of_inputs(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    n = x.shape[0] // 2
    for t in range(n):
        h = s.rnn(x[2 * t], h)
        h = s.rnn2(x[2 * t + 1], h)
    return h


@zoo(steps=12, found=((4, 2),))
def skip_inputs_two_rates(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    g = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        if t % 3 == 2:
            g = s.rnn2(h, g)
    return g, h


@zoo(found=((3, 1),))
def chunks_of_time(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for xs in x.split(3):
        h = torch.tanh(s.r(h) + xs.mean(0))
    return h
