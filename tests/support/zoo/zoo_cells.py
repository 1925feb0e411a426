"""Cells and loops as they are usually written."""

# Written as users write: a name may hold a number, then a tensor.
# mypy: disable-error-code="assignment, no-untyped-call, var-annotated, list-item"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from networks_zoo import SIZE, Net, zeros, zoo


@zoo(found=((9, 1),))
def plain_rnn(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h))
        o.append(h)
    return torch.stack(o), h


@zoo(found=((9, 2),))
def lstm_cell(s: Net, x: Tensor) -> Any:
    h = c = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h, c = s.lstm(x[t], (h, c))
        o.append(h)
    return torch.stack(o), h, c


@zoo(found=((9, 1),))
def gru_cell(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for xt in x:
        h = s.gru(xt, h)
    return h


@zoo(found=((9, 1),))
def rnn_cell_none(s: Net, x: Tensor) -> Any:
    h = None
    o = []
    for xt in x.unbind(0):
        h = s.rnn(xt, h)
        o.append(h)
    return torch.stack(o, 1)


@zoo(found=((9, 2),))
def hand_lstm(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    c = zeros(x)
    for t in range(x.shape[0]):
        i, f, g, o = s.gate(torch.cat([x[t], h], -1)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@zoo(found=((9, 1), (8, 1)))
def encoder_decoder(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
    y = torch.zeros_like(h)
    for _ in range(x.shape[0]):
        h = s.rnn2(y, h)
        y = s.l(h)
        o.append(y)
    return torch.stack(o)


@zoo(found=((9, 1), (9, 1)))
def layers(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    g = zeros(x)
    q = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
    for v in o:
        g = s.rnn2(v, g)
        q.append(g)
    return torch.stack(q)


@zoo(found=((9, 1), (9, 1)))
def bidirectional(s: Net, x: Tensor) -> Any:
    T = x.shape[0]
    h = zeros(x)
    f = []
    b = [None] * T
    for t in range(T):
        h = s.rnn(x[t], h)
        f.append(h)
    h = zeros(x)
    for t in range(T - 1, -1, -1):
        h = s.rnn2(x[t], h)
        b[t] = h
    return torch.stack([torch.cat([p, q], -1) for p, q in zip(f, b, strict=True)])


@zoo(found=((9, 1), (9, 1)))
def bidirectional_same(s: Net, x: Tensor) -> Any:
    T = x.shape[0]
    h = zeros(x)
    f = []
    b = []
    for t in range(T):
        h = s.rnn(x[t], h)
        f.append(h)
    h = zeros(x)
    for t in range(T - 1, -1, -1):
        h = s.rnn(x[t], h)
        b.append(h)
    return torch.cat([torch.stack(f), torch.stack(b[::-1])], -1)


@zoo(found=((9, 1),))
def attention(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
    hs = torch.stack(o, 1)
    a = torch.softmax((hs * h[:, None]).sum(-1), 1)
    return (a[..., None] * hs).sum(1)


@zoo(found=((9, 1),))
def nested(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        for _ in range(3):
            h = torch.tanh(s.r(h) + x[t])
        h = s.l(h)
    return h


@zoo(found=((9, 1),))
def multiplicative(s: Net, x: Tensor) -> Any:
    p = torch.ones(x.shape[1], SIZE, dtype=x.dtype)
    for t in range(x.shape[0]):
        p = p * torch.sigmoid(x[t] * s.w[0])
    return p


@zoo(found=((9, 3),))
def int_counter(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    n = torch.zeros(x.shape[1], dtype=torch.long)
    alive = torch.ones(x.shape[1], dtype=torch.bool)
    for t in range(x.shape[0]):
        h = torch.where(alive[:, None], s.rnn(x[t], h), h)
        n = n + alive
        alive = alive & (h.mean(-1) < 0.4)
    return h, n, alive


@zoo(found=((9, 1),))
def complex_carry(s: Net, x: Tensor) -> Any:
    h = torch.zeros(x.shape[1], SIZE, dtype=torch.complex128)
    r = torch.exp(1j * s.w[0])
    for t in range(x.shape[0]):
        h = h * r * 0.9 + s.l(x[t])
    return h.real, torch.view_as_real(h)


@zoo(found=((9, 1),))
def transposed(s: Net, x: Tensor) -> Any:
    h = zeros(x).t()
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h.t())).t()
    return h


@zoo(found=((9, 1),))
def transposed_view(s: Net, x: Tensor) -> Any:
    h = zeros(x).t()
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h.t().view(-1, SIZE))).t()
    return h


@zoo(found=((9, 2),), inputs=lambda T: (torch.randn(T, 2, 1, 4, 4),))
def conv_lstm(s: Net, x: Tensor) -> Any:
    h = x.new_zeros(x.shape[1], 1, 4, 4).to(memory_format=torch.channels_last)
    c = h
    for t in range(x.shape[0]):
        i, f, g, o = s.conv(torch.cat([x[t], h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = (o.sigmoid() * c.tanh()).contiguous(memory_format=torch.channels_last)
    return h, c


@zoo(found=((9, 2),), inputs=lambda T: (torch.randn(T, 0, SIZE),))
def empty_batch(s: Net, x: Tensor) -> Any:
    return lstm_cell(s, x)


@zoo(found=((9, 1),))
def no_params(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(0.5 * h + x[t])
    return h


@zoo(found=((9, 1),))
def learned_h0(s: Net, x: Tensor) -> Any:
    h = s.h0.expand(x.shape[1], -1)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
    return torch.stack(o)


@zoo(found=((9, 1),))
def learned_h0_direct(s: Net, x: Tensor) -> Any:
    h = s.h0
    for t in range(x.shape[0]):
        h = torch.tanh(s.r(h)) + x[t].mean(0, keepdim=True)
    return h


@zoo(found=((9, 1),))
def checkpointed(s: Net, x: Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    h = zeros(x)
    for t in range(x.shape[0]):
        h = checkpoint(lambda a, b: F.dropout(torch.tanh(s.l(a) + s.r(b)), 0.2), x[t], h, use_reentrant=False)
    return h


@zoo(found=((9, 1),))
def sdpa(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        q = s.l(x[t])[None]
        h = h * 0.5 + F.scaled_dot_product_attention(q, h[None], h[None] + q, dropout_p=0.3)[0]
    return h
