"""Spiking neurons, noise, and regions without gradients."""

# Written as users write: a name may hold a number, then a tensor.
# mypy: disable-error-code="assignment, no-untyped-call, var-annotated, list-item"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from networks_zoo import SIZE, Net, random_spike, spike, zeros, zoo


@zoo(found=((8, 1),))
def lif(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    z = torch.zeros_like(v)
    o = []
    for t in range(x.shape[0]):
        v = 0.9 * v * (1 - z) + s.l(x[t]) + s.r(z)
        z = spike(v - 0.2)
        o.append(s.o(z))
    return torch.stack(o)


@zoo(found=((9, 2),))
def lif_detach(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    acc = 0
    for t in range(x.shape[0]):
        v = 0.9 * v + s.l(x[t])
        soft = torch.sigmoid(4 * (v - 0.2))
        hard = (v > 0.2).to(v.dtype)
        z = soft + (hard - soft).detach()
        v = v - z.detach() * 0.2
        acc = acc + s.o(z)
    return acc


@zoo(found=((9, 2),))
def snn_two(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    u = zeros(x, 3)
    o = []
    for t in range(x.shape[0]):
        v = 0.8 * v + s.l(x[t])
        z = spike(v - 0.3)
        v = v * (1 - z)
        u = 0.8 * u + s.o(z)
        y = spike(u - 0.1)
        u = u - y * 0.1
        o.append(y)
    return torch.stack(o).sum(0), torch.stack(o)


def leaky(beta: Tensor, i: Tensor, mem: Any) -> tuple[Tensor, Tensor]:
    if not torch.is_tensor(mem):
        mem = torch.zeros_like(i)
    _ = mem == None  # noqa: E711  (snnTorch does)
    reset = spike(mem - 0.3).clone().detach()
    base = beta.clamp(0, 1) * mem + i
    mem = base - reset * 0.3
    return spike(mem - 0.3), mem


@zoo(found=((9, 2),))
def snntorch(s: Net, x: Tensor) -> Any:
    m1 = m2 = None
    o = []
    ms = []
    for t in range(x.shape[0]):
        z, m1 = leaky(s.beta, s.l(x[t]), m1)
        y, m2 = leaky(s.beta, s.o(z), m2)
        o.append(y)
        ms.append(m2)
    return torch.stack(o), torch.stack(ms)


@zoo(found=((9, 1),))
def dropout(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = F.dropout(torch.tanh(s.l(x[t]) + s.r(h)), 0.3)
        o.append(h)
    return torch.stack(o)


@zoo(found=((9, 1),))
def noise(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h)) + 0.1 * torch.randn_like(h)
    return h


@zoo(found=((9, 1),))
def no_grad_inside(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h))
        with torch.no_grad():
            m = h.mean(0)
        h = h - m
    return h


@zoo(found=((9, 1),))
def no_grad_around(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    with torch.no_grad():
        for t in range(x.shape[0]):
            h = torch.tanh(s.l(x[t]) + s.r(h))
    return s.o(h)


@zoo(found=((9, 1),))
def autocast_around(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for t in range(x.shape[0]):
            h = torch.tanh(s.l(x[t]) + s.r(h)).to(x.dtype)
    return h


@zoo(found=((9, 1),))
def autocast_inside(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = s.r(h)
        h = torch.tanh(s.l(x[t]) + y.to(x.dtype))
    return h


@zoo(found=((9, 1),))
def stochastic_spike(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    for t in range(x.shape[0]):
        v = 0.9 * v + s.l(x[t])
        z = random_spike(v)
        v = v - z
    return v


@zoo(found=((9, 1),))
def uniform_noise(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    for t in range(x.shape[0]):
        v = 0.9 * v + s.l(x[t]) * torch.empty_like(v).uniform_()
    return v


@zoo(found=((9, 1),))
def no_grad_reset(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    o = []
    for t in range(x.shape[0]):
        v = v * 0.9 + s.l(x[t])
        o.append(v * 1)
        with torch.no_grad():
            v[v > 0.3] = 0
    return torch.stack(o)


@zoo(found=((9, 1),))
def data_reset(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    o = []
    for t in range(x.shape[0]):
        v = v * 0.9 + s.l(x[t])
        o.append(v * 1)
        v.data.clamp_(-0.3, 0.3)
    return torch.stack(o)


@zoo(found=((9, 1),))
def no_grad_invariant(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        with torch.no_grad():
            c = (s.w[0] ** 2).sum()
        h = torch.tanh(h * c + x[t] * s.w[1])
    return h


@zoo(found=((4, 1),))
def no_grad_reader(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
    with torch.no_grad():
        m = o[3].mean()
    return (o[3] * m).sum() + o[2]


@zoo(found=((8, 1),))
def no_grad_step(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        with torch.no_grad():
            g = torch.sigmoid(s.r(h))
        h = h * g + s.l(x[t])
        with torch.no_grad():
            m = h.mean()
        o.append(m)
    return h, torch.stack(o)


@zoo(found=((8, 2),))
def adaptive_threshold(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    b = zeros(x)
    z = zeros(x)
    for t in range(x.shape[0]):
        b = 0.95 * b + z
        v = 0.9 * v + s.l(x[t]) + s.r(z)
        z = spike(v - 0.2 - 0.1 * b)
        v = torch.where(z > 0, torch.zeros_like(v), v)
    return v, b, z


@zoo(found=((9, 3),))
def refractory(s: Net, x: Tensor) -> Any:
    v = zeros(x)
    r = torch.zeros(x.shape[1], SIZE, dtype=torch.int32)
    n = 0
    for t in range(x.shape[0]):
        v = v * 0.9 + s.l(x[t]) * (r <= 0)
        z = spike(v - 0.2)
        r = torch.where(z.bool(), 2, r - 1)
        n = n + z.sum(-1)
    return n, r.to(x.dtype)
