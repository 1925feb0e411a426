"""Random networks: a few random operations a step, on states, past states, inputs and what they give.

A program is a list of (operation, operand, operand, number). Dynamo sees plain Python code of a loop over time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
LONGEST = 32
Instruction = tuple[str, int, int, int]


@dataclass
class Frame:
    """What a step may use: time t of T, inputs x [T, B, W], states, their past, rows written so far, outputs."""

    x: Tensor
    states: list[Tensor]
    t: int = 0
    past: list[list[Tensor]] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.zeros(0))
    outputs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def slice_set(a: Tensor, b: Tensor, k: int) -> Tensor:
    c = a.clone()
    c[:, :k] = b[:, :k]
    c[:, k:] *= 0.5
    return c


def mask_set(a: Tensor, b: Tensor, k: int) -> Tensor:
    c = a * 1
    c[c > 0.2] = 0.1 * k
    return c


def data_set(a: Tensor, b: Tensor, k: int) -> Tensor:
    c = a * 1
    with torch.no_grad():
        c[b > 0.2] = 0
    return c


def gated(a: Tensor, b: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(a)
    return gate * b


def halves(a: Tensor, b: Tensor, k: int) -> Tensor:
    p, q = a.chunk(2, -1)
    return torch.cat([q, p], -1)


PURE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "tanh": lambda a, b, k: torch.tanh(a),
    "scale": lambda a, b, k: a * (0.1 * k),
    "add": lambda a, b, k: a + b,
    "mul": lambda a, b, k: torch.tanh(a) * torch.tanh(b),
    "iadd": lambda a, b, k: (a * 1).add_(b).mul_(0.5),
    "fill": lambda a, b, k: (a * 1).masked_fill_(b > 0.1 * k, 0.3),
    "where": lambda a, b, k: torch.where(a > b, a, 0.5 * b),
    "dropout": lambda a, b, k: F.dropout(a, 0.2 * k),
    "constant": lambda a, b, k: a + torch.tensor(0.1 * k) * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "detach": lambda a, b, k: a.detach() * 0.5 + b,
    "view": lambda a, b, k: a.t().contiguous().view(-1).view(WIDTH, -1).t(),
    "maximum": lambda a, b, k: torch.maximum(a, b),
    "slice": slice_set,
    "mask": mask_set,
    "data": data_set,
    "gated": gated,
    "halves": halves,
}
OPERATIONS = (
    *PURE,
    *("linear", "weight", "input", "earlier", "reverse", "window", "past", "row", "row_add", "row_read", "carry"),
    *("swap", "output", "time", "sometimes", "loss", "last_output"),
)


class Program(nn.Module):
    """A random network."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps: list[Instruction] = [
            (draw.choice(OPERATIONS), draw.randrange(100), draw.randrange(100), draw.randrange(1, 4))
            for _ in range(draw.randint(3, 12))
        ]
        self.steps += [("carry", -1, draw.randrange(3), 0), ("output", -1, 0, 0)]
        self.order = draw.choice(("up", "up", "down", "every other", "from 1"))
        self.ending = draw.randrange(4)
        self.batch = draw.choice((1, 2, 3))
        self.layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.a, self.b = self.layers
        self.w = nn.Parameter(torch.rand(LONGEST, WIDTH))

    def times(self, steps: int) -> Iterable[int]:
        """The steps in their order."""
        ranges = {"up": range(steps), "down": reversed(range(steps)), "every other": range(0, steps, 2)}
        return ranges.get(self.order, range(1, steps))

    def forward(self, x: Tensor) -> list[Tensor]:
        frame = Frame(x, [x.new_zeros(x.shape[1:]), x.new_ones(x.shape[1:]) * 0.1, self.w[: x.shape[1]]])
        frame.past = [[state.clone() for _ in range(3)] for state in frame.states]
        frame.rows = torch.zeros_like(x)
        for frame.t in self.times(x.shape[0]):
            frame.values = [x[frame.t], *frame.states]
            for instruction in self.steps:
                self.play(frame, *instruction)
            for past, state in zip(frame.past, frame.states, strict=True):
                past.append(state)
        return self.end(frame)

    def play(self, frame: Frame, name: str, i: int, j: int, k: int) -> None:
        """One operation."""
        values = frame.values
        a, b = values[i % len(values)], values[j % len(values)]
        if name in PURE:
            values.append(PURE[name](a, b, k))
        elif name == "carry":
            frame.states[j % 3] = torch.tanh(a) + 0.3 * frame.states[j % 3]
        elif name == "swap":
            frame.states[0], frame.states[1] = frame.states[1], frame.states[0]
        elif name == "output":
            frame.outputs.append(a)
        elif name == "sometimes":
            values[i % len(values)] = a * 0.9 if frame.t % (k + 1) == 0 else a
        elif name == "row":
            frame.rows[frame.t] = a
        elif name == "row_add":
            frame.rows[frame.t] += a * 0.3
        else:
            values.append(self.read(frame, name, a, i, k))

    def read(self, frame: Frame, name: str, a: Tensor, i: int, k: int) -> Tensor:
        """A value that depends on the time or on parameters."""
        x, t, steps = frame.x, frame.t, frame.x.shape[0]
        choices: dict[str, Callable[[], Any]] = {
            "linear": lambda: (self.a if k == 1 else self.b)(a),
            "weight": lambda: a * (self.w[t] if k == 1 else self.w[k].clamp(0, 1)),
            "input": lambda: x[t],
            "earlier": lambda: x[max(t - k, 0)],
            "reverse": lambda: x[steps - 1 - t],
            "window": lambda: x[max(t - k, 0) : t + 1].mean(0),
            "past": lambda: frame.past[i % 3][-k],
            "row_read": lambda: frame.rows[t].clone(),
            "time": lambda: a * (1 + 0.1 * t / steps),
            "loss": lambda: a + (a**2).mean() * 0.9 ** (t if k == 1 else k),
            "last_output": lambda: frame.outputs[-1] * 0.2 if frame.outputs else a,
        }
        found: Tensor = choices[name]()
        return found

    def end(self, frame: Frame) -> list[Tensor]:
        """What is given in the end."""
        if self.ending == 0:
            return [torch.stack(frame.outputs), *frame.states]
        if self.ending == 1:
            return [frame.rows, *frame.outputs[:2], frame.past[0][-2]]
        if self.ending == 2:
            total = sum(frame.past[1])
            assert isinstance(total, Tensor)
            return [torch.cat(frame.outputs, -1), total]
        return [frame.states[0].sum(), frame.rows.mean(), frame.past[2][4], frame.outputs[-1]]
