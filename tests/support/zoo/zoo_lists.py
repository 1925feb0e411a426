"""Networks with lists of inputs, outputs, losses and past states."""

# Written as users write: a name may hold a number, then a tensor.
# mypy: disable-error-code="assignment, no-untyped-call, var-annotated, list-item"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from networks_zoo import SIZE, Net, zeros, zoo


@zoo(found=((9, 3),))
def delays(s: Net, x: Tensor) -> Any:
    st = [zeros(x) for _ in range(3)]
    for t in range(x.shape[0]):
        st.append(torch.tanh(s.l(x[t]) + 0.5 * st[-1] - 0.2 * st[-3]))
    return torch.stack(st[3:])


@zoo(found=((9, 3),))
def delays_same_init(s: Net, x: Tensor) -> Any:
    z = zeros(x)
    st = [z, z, z]
    for t in range(x.shape[0]):
        st.append(torch.tanh(s.l(x[t]) + 0.5 * st[-1] - 0.2 * st[-3]))
    return st[-1]


@zoo(found=((6, 4),))
def delays_late(s: Net, x: Tensor) -> Any:
    st = [zeros(x)]
    for t in range(x.shape[0]):
        h = s.l(x[t]) + 0.5 * st[-1]
        if t >= 3:
            h = h - 0.2 * st[-4]
        st.append(torch.tanh(h))
    return torch.stack(st[1:])


@zoo(found=((9, 1),), inputs=lambda T: ([torch.randn(2, SIZE) for _ in range(T)],))
def list_inputs(s: Net, xs: list[Tensor]) -> Any:
    h = torch.zeros(2, SIZE)
    o = []
    for x in xs:
        h = s.rnn(x, h)
        o.append(h)
    return o


@zoo(found=((9, 2),))
def scalars(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    T = x.shape[0]
    loss = 0
    for t in range(T):
        h = torch.tanh(s.l(x[t]) * (1 + t / T) + s.r(h))
        loss = loss + 0.9**t * h.pow(2).mean()
    return loss


@zoo(found=((9, 1),))
def last_only(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        y = s.o(h)
    return y


@zoo(found=((9, 2),))
def loss_inside(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    loss = 0.0
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        loss += F.mse_loss(s.o(h), x[t, :, : s.o.out_features])
    return loss / x.shape[0]


@zoo(found=((9, 1), (9, 1), (9, 1)))
def losses_sum(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    ls = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        ls.append(F.mse_loss(s.o(h), x[t, :, : s.o.out_features]))
    return sum(ls), torch.stack(ls).mean(), sum(ls) / len(ls)


@zoo(found=((9, 1),))
def constants(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(
            s.r(h) * s.scale
            + x[t] * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=x.dtype)
            + torch.tensor(0.5 * t)
        )
    return h


@zoo(found=((9, 2),))
def dict_state(s: Net, x: Tensor) -> Any:
    st = {"h": zeros(x), "c": zeros(x)}
    lg = []
    for t in range(x.shape[0]):
        h, c = s.lstm(x[t], (st["h"], st["c"]))
        st = {"h": h, "c": c}
        lg.append({"y": s.o(h), "n": h.norm()})
    return [d["y"] for d in lg], torch.stack([d["n"] for d in lg]), st


@zoo(found=((7, 1),))
def every_third_out(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        if t % 3 == 0:
            o.append(h)
    return torch.stack(o)


@zoo(found=((3, 1), (6, 1)))
def late_out(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        if t >= 3:
            o.append(s.o(h))
    return torch.stack(o)


@zoo(found=((9, 4),))
def fifo(s: Net, x: Tensor) -> Any:
    buf = [zeros(x) for _ in range(4)]
    for t in range(x.shape[0]):
        y = torch.tanh(s.l(x[t]) + s.r(buf[0]) + buf[2])
        buf = [*buf[1:], y]
    return torch.stack(buf)


@zoo(found=((8, 1),))
def diff_inputs(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(1, x.shape[0]):
        h = s.rnn(x[t] - x[t - 1], h)
        o.append(h)
    return torch.stack(o)


@zoo(found=((9, 1), (9, 1)))
def hidden_list_mean(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
    return sum(o) / len(o), o[0], o[-1], o[3]


@zoo(found=((9, 1),))
def residual_stack(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.ln(h + s.rnn(x[t], h))
        o.append(h.unsqueeze(0))
    return (
        [y * s.w[0, 0] + y.sin() for y in (torch.cat(o), torch.vstack(o))],
        torch.cat(o, dim=-1).sin(),
        torch.cat([v[0] for v in o], 1).exp(),
    )


@zoo(found=((9, 3),))
def dt_numbers(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    loss = torch.zeros((), dtype=x.dtype)
    k = torch.zeros(x.shape[1], dtype=torch.long)
    for t in range(x.shape[0]):
        h = torch.tanh(s.r(h) + x[t])
        loss = loss * (0.5 + 0.01 * t)
        loss = loss + h.mean()
        k = k + t
        n = k * (0.5 * t)
    return loss, k, n


@zoo(
    found=((7, 1),),
    inputs=lambda T: (
        [torch.randn(2, SIZE).t().contiguous().t() if i % 2 else torch.randn(2, SIZE) for i in range(T)],
    ),
)
def list_layouts(s: Net, xs: list[Tensor]) -> Any:
    h = torch.zeros(2, SIZE)
    for i, x in enumerate(xs):
        h = s.rnn(x if i > 6 else x.detach(), h)
    return h


@zoo(steps=12, found=((4, 1),))
def list_mixed_grad(s: Net, x: Tensor) -> Any:
    xs = [x[t] if t % 3 else x[t].detach() * 2 for t in range(x.shape[0])]
    h = zeros(x)
    for v in xs:
        h = torch.tanh(s.r(h) + v)
    return h


@zoo(found=((8, 1),))
def conv1d_cache(s: Net, x: Tensor) -> Any:
    cache = torch.zeros(x.shape[1], 3, SIZE, dtype=x.dtype)
    o = []
    for t in range(x.shape[0]):
        cache = torch.cat([cache[:, 1:], x[t].unsqueeze(1)], 1)
        o.append((cache * s.w[:3]).sum(1).tanh())
    return torch.stack(o), cache


@zoo(found=((9, 1),))
def interleaved_lists(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
        o.append(h)
        o.append(s.l(h))
    return torch.stack(o)


@zoo(found=((9, 1),))
def float_out_state(s: Net, x: Tensor) -> Any:
    h = zeros(x).float()
    o = []
    for t in range(x.shape[0]):
        h = 0.5 * h + x[t].float()
        o.append(h.double() * (0.1 * t))
    return torch.stack(o)


@zoo(found=((9, 2),))
def bfloat_scalars(s: Net, x: Tensor) -> Any:
    h = zeros(x).bfloat16()
    n = torch.zeros((), dtype=torch.float32)
    for t in range(x.shape[0]):
        h = h * (0.3 + 0.1 * t) + x[t].bfloat16()
        n = n + (0.1 * t)
        n = n * (1 - 0.01 * t)
    return h.double(), n


@zoo(found=((9, 1),))
def iter_zip(s: Net, x: Tensor) -> Any:
    h = zeros(x)
    o = []
    for i, (a, b) in enumerate(zip(x, reversed(x.unbind()), strict=True)):
        h = s.rnn(a + b, h)
        o += [h * i]
    return torch.stack(o)
