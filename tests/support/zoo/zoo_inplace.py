"""Networks that update tensors in place."""

# Written as users write: a name may hold a number, then a tensor.
# mypy: disable-error-code="assignment, no-untyped-call, var-annotated, list-item"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from networks_zoo import SIZE, Net, zeros, zoo


@zoo(found=((9, 1),))
def iadd(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    o = []
    for t in range(x.shape[0]):
        v = v * 0.9
        v += s.l(x[t])
        v.mul_(0.95).add_(0.1)
        o.append(torch.tanh(v))
    return torch.stack(o), v


@zoo(found=((9, 2),))
def iadd_carry(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    a = zeros(x)
    for t in range(x.shape[0]):
        v += s.l(x[t])
        v *= 0.9
        a += torch.tanh(v)
    return v, a


@zoo(found=((8, 1),))
def masked_fill(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    o = []
    for t in range(x.shape[0]):
        v = v * 0.9 + s.l(x[t])
        z = v > 0.3
        o.append(v.clone())
        v.masked_fill_(z, 0.0)
    return torch.stack(o)


@zoo(found=((9, 1),))
def mask_set(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    for t in range(x.shape[0]):
        v = v * 0.9 + s.l(x[t])
        v[v > 0.3] = 0
    return v


@zoo(found=((9, 1),))
def slice_set(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        y = torch.tanh(s.l(x[t]) + s.r(h))
        h = h.clone()
        h[:, :3] = y[:, :3]
        h[:, 3:] += y[:, 3:]
    return h


@zoo(found=((9, 1),))
def slice_set_carry(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        y = torch.tanh(s.l(x[t]) + s.r(h.clone()))
        h[:, :3] = y[:, :3]
        h[:, 3:] += y[:, 3:]
    return h


@zoo(found=((9, 1),))
def relu_inplace(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = F.relu_(s.l(x[t]) + s.r(h))
        h = F.hardtanh(h * 1.1, inplace=True)
        h = F.relu(h, inplace=True)
    return h


@zoo(found=((9, 1),))
def out_rows(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        out[t] = h
    return out


@zoo(found=((9, 1),))
def out_rows_batch_first(s: Net, x: Tensor) -> Any:
    x = x.transpose(0, 1)
    h = x.new_zeros(x.shape[0], SIZE)
    out = torch.empty(x.shape[0], x.shape[1], SIZE, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = s.rnn(x[:, t], h)
        out[:, t] = h
    return out


@zoo(found=((9, 1),))
def read_back(s: Net, x: Tensor) -> Any:
    out = torch.zeros(x.shape[0] + 1, x.shape[1], SIZE, dtype=x.dtype)
    for t in range(x.shape[0]):
        out[t + 1] = torch.tanh(s.l(x[t]) + s.r(out[t].clone()))
    return out


@zoo(found=((8, 1),))
def read_back_if(s: Net, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        h = s.l(x[t])
        if t > 0:
            h = h + s.r(out[t - 1].clone())
        out[t] = torch.tanh(h)
    return out


@zoo(found=((9, 1),))
def grow_cat(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = h[None]
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o = torch.cat([o, h[None]], 0)
    return o


@zoo(found=((9, 1),))
def grow_cat_dim1(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = x.new_zeros(x.shape[1], 0, SIZE)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o = torch.cat((o, h.unsqueeze(1)), dim=1)
    return o


@zoo(found=((8, 1),), inputs=lambda T: (torch.randn(T, 2, SIZE),), leaf=False)
def mutates_input(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        x[t] *= 0.5
        h = torch.tanh(s.r(h) + x[t].clone())
    return h


@zoo(found=((8, 1),), leaf=False)
def mutates_next_input(s: Net, x: Tensor) -> Any:
    for t in range(1, x.shape[0]):
        x[t] += torch.tanh(s.r(x[t - 1].clone()))
    return x.sum(0)


@zoo(found=((9, 1),))
def roll_buffer(s: Net, x: Tensor) -> Any:
    buf = x.new_zeros(4, x.shape[1], SIZE)
    for t in range(x.shape[0]):
        y = torch.tanh(s.l(x[t]) + buf.mean(0))
        buf = torch.roll(buf, 1, 0)
        buf[0] = y
    return buf


@zoo(steps=13, found=((3, 1),))
def ring_buffer(s: Net, x: Tensor) -> Any:
    buf = x.new_zeros(4, x.shape[1], SIZE)
    for t in range(x.shape[0]):
        buf[t % 4] = torch.tanh(s.l(x[t]) + buf.mean(0))
    return buf


@zoo(found=((8, 1),))
def cumsum_rows(s: Net, x: Tensor) -> Any:
    out = x.clone()
    for t in range(1, x.shape[0]):
        out[t] += torch.tanh(out[t - 1].clone())
    return out


@zoo(found=((9, 1),))
def view_chain_update(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        y = torch.tanh(s.l(x[t])).reshape(-1)
        h = h.clone()
        h.view(-1)[::2] += y[::2]
    return h


@zoo(found=((9, 1),))
def shared_state_alias(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    k = h
    o = []
    for t in range(x.shape[0]):
        h += s.l(x[t]).detach()
        o.append((k * 2).clone())
    return torch.stack(o), k


@zoo(found=((9, 1),))
def row_accumulate(s: Net, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        out[t] += h
        out[t] *= 2
    return out


@zoo(found=((9, 1),))
def fill_scalar(s: Net, x: Tensor) -> Any:
    out = torch.zeros(x.shape[0], 3, dtype=x.dtype)
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        out[t] = h.mean()
    return out


@zoo(found=((9, 1),))
def scatter_state(s: Net, x: Tensor) -> Any:
    m = x.new_zeros(x.shape[1], 4, SIZE)
    for t in range(x.shape[0]):
        i = x[t].argmax(-1) % 4
        m = m.clone()
        m[torch.arange(x.shape[1]), i] = torch.tanh(s.l(x[t]) + m.sum(1))
    return m


@zoo(found=((9, 1),))
def row_parts(s: Net, x: Tensor) -> Any:
    out = x.new_zeros(x.shape[0], x.shape[1], 2 * SIZE)
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        out[t, :, :SIZE] = h
        out[t, :, SIZE:] += h.sin()
        out[t, :, 2] = 1.0
    return out


@zoo(found=((9, 1),))
def row_broadcast(s: Net, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        out[t] = h[None, :, :1]
        out[t, 0] *= 2
    return out
