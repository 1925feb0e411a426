"""Networks that nobody would write, or somebody did."""

# Written as users write: a name may hold a number, then a tensor.
# mypy: disable-error-code="assignment, no-untyped-call, var-annotated, list-item"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from networks_zoo import SIZE, Net, zeros, zoo


@zoo(found=((9, 4),), inputs=lambda T: (torch.randn(T, 3, SIZE),))  # of two, one is the other's negative
def batch_norm(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):  # without biases: their gradients would be zeros but for rounding
        h = torch.tanh(s.bn(F.linear(x[t], s.l.weight) + F.linear(h, s.r.weight)))
    return h


@zoo(found=((9, 1), (9, 1)), calls=3)
def on_module(s: Net, x: Tensor) -> Any:
    if s.h is None:
        s.h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        s.h = s.rnn(x[t], s.h)
        o.append(s.h)
    s.h = s.h.detach()
    return torch.stack(o)


@zoo(found=((9, 2),))
def invariants_out(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    reg = 0
    for t in range(x.shape[0]):
        b = s.beta.clamp(0, 1)
        h = b * h + x[t]
        o.append(b)
        reg = reg + (s.w**2).sum()
    return h, torch.stack(o), o[2], reg


@zoo(found=((9, 2),))
def swap(s: Net, x: Tensor) -> Any:
    a, b = zeros(x), zeros(x) + 1
    for t in range(x.shape[0]):
        a, b = b, torch.tanh(s.l(x[t]) + s.r(a))
    return a, b


@zoo(found=((9, 2),))
def hold(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    mx = torch.full_like(h, -10.0)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        mx = torch.maximum(mx, h)
    return mx


@zoo(found=((9, 1),))
def topk(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        v, i = torch.topk(s.l(x[t]) + s.r(h), 2, -1)
        h = torch.zeros_like(h).scatter(1, i, v)
    return h


@zoo(found=((8, 1),))
def embedding_feedback(s: Net, x: Tensor) -> Any:
    tok = torch.zeros(x.shape[1], dtype=torch.long)
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(s.w[tok] + x[t], h)
        y = s.l(h)
        tok = y.argmax(-1)
        o.append(y)
    return torch.stack(o), tok


@zoo(found=((9, 1),))
def weight_norm(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        w = s.r.weight / s.r.weight.norm()
        h = torch.tanh(F.linear(h, w) + x[t])
    return h


@zoo(found=((9, 2),))
def fast_weights(s: Net, x: Tensor) -> Any:
    A = x.new_zeros(x.shape[1], SIZE, SIZE)
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + torch.einsum("bij,bj->bi", A, h))
        A = 0.9 * A + 0.1 * h[:, :, None] * h[:, None, :]
    return h, A


@zoo(found=((9, 1),))
def pre_projected(s: Net, x: Tensor) -> Any:
    p = s.l(x)
    q = [s.o(v) for v in x]
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = torch.tanh(p[t] + s.r(h))
        o.append(torch.cat([h, q[t]], -1))
    return torch.stack(o)


@zoo(found=((9, 1), (9, 1)))
def two_same_loops(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    g = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
    for t in range(x.shape[0]):
        g = s.rnn(x[t], g + h)
    return g


@zoo(found=((9, 3),))
def count_buffer(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        s.count += 1
        s.scale.mul_(0.99)
    return h * s.count


@zoo(found=())
def vmapped(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.vmap(lambda a, b: torch.tanh(a + b.sum()))(s.l(x[t]), h)
    return h


@zoo(found=((9, 3),), inputs=lambda T: (torch.randn(T, 2, SIZE), torch.randn(2, SIZE)))
def parameter_update(s: Net, x: Tensor, y: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + h)
        with torch.no_grad():
            s.count.add_(h.mean())
            s.scale.lerp_(h[0], 0.1)
    return h * s.scale + s.count


@zoo(found=((9, 3),))
def tuple_of_layers(s: Net, x: Tensor) -> Any:
    hs = [zeros(x) for _ in range(3)]
    cells = [s.rnn, s.rnn2, s.rnn]
    for t in range(x.shape[0]):
        y = x[t]
        for i in range(3):
            hs[i] = cells[i](y, hs[i])
            y = hs[i]
    return hs


@zoo(found=((6, 1),))
def mlp(s: Net, x: Tensor) -> Any:
    h = x[0]
    for i in range(6):
        h = torch.relu(F.linear(h, s.w[i : i + 1].t() * s.w[6:7]))
    return h


@zoo(found=((9, 2),))
def leapfrog(s: Net, x: Tensor) -> Any:
    q = zeros(x)
    p = zeros(x)
    dt = 0.1
    for t in range(x.shape[0]):
        p = p - 0.5 * dt * torch.sin(q)
        q = q + dt * p
        p = p - 0.5 * dt * torch.sin(q) + dt * x[t]
    return q, p


@zoo(found=((8, 1),))
def rk4(s: Net, x: Tensor) -> Any:
    def f(y: Tensor, u: Tensor) -> Any:
        return torch.tanh(s.r(y)) + u

    y = zeros(x)
    for t in range(x.shape[0] - 1):
        u, m = x[t], (x[t] + x[t + 1]) / 2
        k1 = f(y, u)
        k2 = f(y + 0.05 * k1, m)
        k3 = f(y + 0.05 * k2, m)
        k4 = f(y + 0.1 * k3, x[t + 1])
        y = y + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return y


@zoo(found=((9, 3),))
def eligibility(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    e = torch.zeros(SIZE, SIZE, dtype=x.dtype)
    n = 0
    for t in range(x.shape[0]):
        e = 0.9 * e + h.t() @ x[t]
        h = torch.tanh(x[t] @ e.detach() * 0.1 + s.l(h))
        n = n + (h**2).mean() * 0.99**t
    return n, e


@zoo(found=())
def unused_param_output(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
        _ = s.l(h)
    return o[0]


@zoo(found=((9, 1),))
def state_dtype_change(s: Net, x: Tensor) -> Any:
    h = zeros(x) > 0
    for t in range(x.shape[0]):
        h = (h.to(x.dtype) @ s.r.weight + x[t]) > 0
    return h.to(x.dtype) * s.w[0]


@zoo(found=((9, 1),))
def condition(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        u = s.l(x[t]) + s.r(h)
        h = torch.cond(u.sum() > 0, torch.tanh, lambda v: torch.sigmoid(v) * s.beta, (u,))
    return h
