"""Small networks on which ``proof_mutants.py`` switches faults on: recurrent, spiking, random ones, over depth.

Shape letters: T steps, B batch, I inputs and neurons alike.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support" / "models"))
_shared = importlib.import_module("networks")  # of the tests, found only now
Clip, Spike = _shared.Clip, _shared.Spike
WIDE = 6
COMPILE, BACKEND = "reroll.compile", "torch.compile"


class Model(nn.Module):
    """The parts that the networks share, around one of them."""

    count: Tensor

    def __init__(self, run: Callable[..., Any], steps: int) -> None:
        super().__init__()
        self.run = run
        self.a, self.b, self.c = (nn.Linear(WIDE, WIDE) for _ in range(3))
        self.gru, self.lstm, self.rnn = (each(WIDE, WIDE) for each in (nn.GRUCell, nn.LSTMCell, nn.RNNCell))
        self.layers = nn.LSTM(WIDE, WIDE, bidirectional=True)
        self.norm, self.conv = nn.BatchNorm1d(WIDE), nn.Conv2d(2, 2, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.table = nn.Embedding(WIDE, WIDE)
        self.weights = nn.ParameterList(torch.randn(WIDE, WIDE) / 3 for _ in range(steps))
        self.h0 = nn.Parameter(torch.randn(1, WIDE))
        self.beta = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x_TBI: Tensor) -> Any:
        """What the network gives."""
        return self.run(self, x_TBI)


class Block(nn.Module):
    """A block over depth."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 12), nn.Linear(12, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        """The value, and what the block adds to it."""
        y: Tensor = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))
        return x + y


@dataclass(frozen=True)
class Network:
    """A network, how it is compiled, and what is trained: ``loss`` of its results, all of them unless it is given."""

    run: Callable[..., Any]
    steps: int
    door: str = COMPILE
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)
    integers: bool = False
    read: tuple[int, ...] | None = None


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[1], WIDE)


def elman(m: Model, x: Tensor) -> Any:
    h, rows = m.h0.expand(x.shape[1], WIDE), []
    for t in range(x.shape[0]):
        h = torch.tanh(m.a(x[t]) + m.b(h))
        rows.append(m.c(h))
    return torch.stack(rows), h


def gru(m: Model, x: Tensor) -> Any:
    h, rows = zeros(x), []
    for x_t in x:
        h = m.gru(x_t, h)
        rows.append(h)
    return torch.stack(rows), h


def lstm(m: Model, x: Tensor) -> Any:
    h, c, rows = zeros(x), zeros(x), []
    for x_t in x.unbind(0):
        h, c = m.lstm(x_t, (h, c))
        rows.append(h)
    return torch.stack(rows).mean(0), c


def layers(m: Model, x: Tensor) -> Any:
    y, (h, c) = m.layers(x)
    return y, h, c


def lif(m: Model, x: Tensor) -> Any:
    v, z, total = zeros(x), zeros(x), zeros(x)
    for t in range(x.shape[0]):
        v = 0.9 * v * (1 - z) + m.a(x[t]) + m.b(z)
        z = Spike.apply(1 + v)
        total = total + m.c(z)
    return total / x.shape[0]


def alif(m: Model, x: Tensor) -> Any:
    """Thresholds adapt, and spikes arrive two steps late."""
    v, a, z, late, trains = zeros(x), zeros(x), zeros(x), m.h0.expand(x.shape[1], WIDE), []
    for t in range(x.shape[0]):
        a = 0.95 * a + 0.1 * z
        v = m.beta * v + m.a(x[t]) + m.b(late) - z
        late, z = z, Spike.apply(1 + v - a)
        trains.append(z)
    return torch.stack(trains), v, late


def two_layers(m: Model, x: Tensor) -> Any:
    """One loop behind another, the second a step late, and a readout of all rows."""
    first, second, v, u = [], [], zeros(x), zeros(x)
    for t in range(x.shape[0]):
        v = 0.8 * v + m.a(x[t])
        first.append(Spike.apply(1 + v))
    for t in range(1, x.shape[0]):
        u = torch.sigmoid(m.b(first[t - 1]) + 0.7 * u)
        second.append(u)
    return m.c(torch.stack(second)), torch.stack(first)


def dropped(m: Model, x: Tensor) -> Any:
    h, rows = zeros(x), []
    for t in range(x.shape[0]):
        h = F.dropout(torch.tanh(m.a(x[t]) + m.b(h)), 0.3)
        rows.append(h)
    return torch.stack(rows)


def noisy(m: Model, x: Tensor) -> Any:
    h, rows = zeros(x), []
    for t in range(x.shape[0]):
        z = torch.bernoulli(torch.sigmoid(m.a(x[t]) + m.b(h)).detach())
        h = 0.9 * h + z * m.c(x[t]) + 0.1 * torch.randn_like(h)
        rows.append(h)
    return torch.stack(rows), h


def deep(m: Model, x: Tensor) -> Any:
    for block in m.blocks:
        x = block(x)
    return x


def normed(m: Model, x: Tensor) -> Any:
    m.count += 1
    h, rows = zeros(x), []
    for t in range(x.shape[0]):
        h = m.norm(m.rnn(x[t], h))
        rows.append(h)
    return torch.stack(rows)


def fast_weights(m: Model, x: Tensor) -> Any:
    state, rows = x.new_zeros(x.shape[1], WIDE, WIDE), []
    for t in range(x.shape[0]):
        q, k, v = m.a(x[t]), m.b(x[t]), m.c(x[t])
        state = torch.sigmoid(m.beta) * state + k[:, :, None] * v[:, None, :]
        rows.append(torch.einsum("bi,bij->bj", q, state))
    return torch.stack(rows), state


def language(m: Model, x: Tensor) -> Any:
    """Tokens, and their loss."""
    h, rows = x.new_zeros(x.shape[1], WIDE, dtype=m.beta.dtype), []
    for t in range(x.shape[0]):
        h = m.gru(m.table(x[t]), h)
        rows.append(h)
    scores = m.a(torch.stack(rows))
    return F.cross_entropy(scores[:-1].flatten(0, 1), x[1:].flatten())


def both_ways(m: Model, x: Tensor) -> Any:
    there, back, h, g = [], [], zeros(x), zeros(x)
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        there.append(h)
    for t in reversed(range(x.shape[0])):
        g = torch.tanh(m.b(x[t]) + 0.5 * g)
        back.append(g)
    return torch.cat([torch.stack(there), torch.stack(back[::-1])], -1)


def weights_of_steps(m: Model, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ m.weights[t] + m.b(h))
    return h


def numbered(m: Model, x: Tensor) -> Any:
    h, rows = zeros(x), []
    for t in range(x.shape[0]):
        h = torch.tanh(m.a(x[t]) * 0.9**t + h / (t + 2))
        rows.append(h)
    return torch.stack(rows, 1), h


def in_place(m: Model, x: Tensor) -> Any:
    h, out = zeros(x), x.new_zeros(x.shape)
    for t in range(x.shape[0]):
        h = h * m.beta
        h.add_(m.a(x[t]))
        out[t] = torch.cos(h).mul_(2)
        m.count += 1
    return out


def apart(m: Model, x: Tensor) -> Any:
    """Results of which one alone is trained."""
    h, g, rows, others = zeros(x), zeros(x), [], []
    for t in range(x.shape[0]):
        h = torch.tanh(m.a(x[t]) + 0.5 * h)
        g = torch.tanh(m.b(x[t]) + 0.5 * g)
        rows.append(h)
        others.append(g)
    return torch.stack(rows), torch.stack(others)


def convolved(m: Model, x: Tensor) -> Any:
    images = x[..., : WIDE // 2 * 2].reshape(x.shape[0], x.shape[1], 2, WIDE // 2, 1).expand(-1, -1, -1, -1, 3)
    h = torch.zeros_like(images[0])
    for image in images:
        h = torch.tanh(m.conv(h) + image)
    return h


def clipped(m: Model, x: Tensor) -> Any:
    h = zeros(x)
    for t in range(x.shape[0]):
        h = torch.tanh(F.linear(x[t], Clip.apply(m.a.weight)) + m.b(h))
    return h


def cut(m: Model, x: Tensor) -> Any:
    """A state that is read without a gradient, one that keeps it, and the input of every other step."""
    h, rows = zeros(x), []
    for t in range(0, x.shape[0], 2):
        h = torch.tanh(m.a(x[t]) + m.b(h.detach()) + 0.3 * h)
        rows.append(h)
    return torch.stack(rows)


def last_row(m: Model, x: Tensor) -> Any:
    h, rows = zeros(x), []
    for t in range(x.shape[0]):
        h = torch.tanh(m.a(x[t]) + m.b(h))
        rows.append(h)
    return m.c(torch.stack(rows))[-1]


def some_rows(m: Model, x: Tensor) -> Any:
    h, rows = zeros(x), []
    for t in range(x.shape[0]):
        h = torch.tanh(m.a(x[t]) + m.b(h))
        rows.append(h)
    return m.c(torch.stack(rows)[1::3])


NETWORKS: Mapping[str, Network] = {
    "elman": Network(elman, 15),
    "elman, long": Network(elman, 40),
    "elman, double": Network(elman, 16, BACKEND, options={"schedule": "double", "segment": 2, "chunk": 8, "slots": 2}),
    "gru, revolve": Network(gru, 10, BACKEND, torch.float32, {"schedule": "revolve", "slots": 2, "segment": 2}),
    "lstm, budget": Network(lstm, 8, BACKEND, options={"memory_budget": 0.75, "segment": 2}),
    "nn.LSTM": Network(layers, 7, BACKEND),
    "lif, disk": Network(lif, 16, BACKEND, torch.float32, {"schedule": "double", "remote": "disk", "segment": 2}),
    "lif, replay": Network(lif, 24, BACKEND, torch.float32, {"replay": True, "segment": 4}),
    "alif": Network(alif, 12, BACKEND, options={"schedule": "standard", "chunk": 4, "segment": 2}),
    "two layers": Network(two_layers, 11, BACKEND),
    "dropout, double": Network(dropped, 16, BACKEND, options={"schedule": "double", "segment": 2}),
    "noise": Network(noisy, 11, BACKEND, options={"schedule": "standard", "chunk": 6, "segment": 3}),
    "depth, budget": Network(deep, 5, BACKEND, options={"memory_budget": 0.7}),
    "batch norm": Network(normed, 7, BACKEND),
    "fast weights": Network(fast_weights, 6, BACKEND, options={"segment": 3}),
    "language model": Network(language, 7, BACKEND, integers=True),
    "both ways": Network(both_ways, 7, BACKEND, torch.float32),
    "weights of steps": Network(weights_of_steps, 7, BACKEND, options={"schedule": "full", "segment": 2}),
    "numbers": Network(numbered, 11),
    "in place": Network(in_place, 8, BACKEND),
    "first of two": Network(apart, 9, BACKEND, read=(0,)),
    "second of two": Network(apart, 9, BACKEND, read=(1,)),
    "convolution": Network(convolved, 7, BACKEND, torch.float32),
    "clipped": Network(clipped, 8, BACKEND, options={"schedule": "hierarchical", "segment": 1}),
    "last row": Network(last_row, 8, BACKEND),
    "some rows": Network(some_rows, 12, BACKEND, options={"segment": 4}),
    "every other step": Network(cut, 16, BACKEND),
}
