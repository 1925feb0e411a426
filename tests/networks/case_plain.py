"""Networks in plain PyTorch: those of the zoo that the field knows, and convolutional and recurrent spiking ones.

T time, B batch, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from networks import RecurrentLIF
from networks_zoo import Net, load, spike
from training import Case

ZOO = load()
NAMES: dict[str, str] = {
    "adaptive threshold": "adaptive_threshold",
    "delays": "delays",
    "encoder-decoder": "encoder_decoder",
    "attention": "attention",
    "truncated BPTT": "detach_every",
    "loss inside": "loss_inside",
    "list of losses": "losses_sum",
    "neural ODE": "rk4",
    "reversed time": "reversed_time",
    "bidirectional": "bidirectional",
    "nested": "nested",
}


class ConvolutionalSpiking(nn.Module):
    """Two spiking convolutions, normed and pooled, and a readout that is averaged over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.Conv2d(2, 3, 3, padding=1)
        self.norm, self.pool, self.out = nn.BatchNorm2d(2), nn.AvgPool2d(2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch = x.shape[:2]
        v1 = x.new_zeros(batch, self.conv1.out_channels, 4, 4)
        v2 = x.new_zeros(batch, self.conv2.out_channels, 2, 2)
        total = x.new_zeros(batch, self.out.out_features)
        for t in range(steps):
            v1 = 0.8 * v1 + self.norm(self.conv1(x[t]))
            z1 = spike(v1 - 0.4)
            v1 = v1 - 0.4 * z1
            v2 = 0.8 * v2 + self.conv2(self.pool(z1))
            z2 = spike(v2 - 0.2)
            v2 = v2 - 0.2 * z2
            total = total + self.out(z2.flatten(1))
        return total / steps


class LearnableDecay(nn.Module):
    """A spiking layer whose neurons each learn their decay and threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        neurons = self.fc.out_features
        self.decay, self.threshold = nn.Parameter(torch.randn(neurons)), nn.Parameter(torch.full((neurons,), 0.4))

    def forward(self, x: Tensor) -> Tensor:
        v, ys = x.new_zeros(x.shape[1], self.fc.out_features), []
        for t in range(x.shape[0]):
            v = torch.sigmoid(self.decay) * v + self.fc(x[t])
            z = spike(v - self.threshold)
            v = v * (1 - z)
            ys.append(self.out(z))
        return torch.stack(ys)


class TeacherForcing(nn.Module):
    """A decoder that is fed the true symbol at some steps, by a mask, and its own output at the others."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 5), nn.Linear(5, 3)

    def forward(self, truth: Tensor, forced: Tensor) -> Tensor:
        h, y, ys = truth.new_zeros(truth.shape[1], self.cell.hidden_size), torch.zeros_like(truth[0]), []
        for t in range(truth.shape[0]):
            h = self.cell(torch.where(forced[t], truth[t], y), h)
            y = self.out(h)
            ys.append(y)
        return torch.stack(ys)


class AlwaysForced(TeacherForcing):
    """The usual training of a decoder: at every step the true symbol of the step before."""

    def forward(self, truth: Tensor, forced: Tensor) -> Any:
        h, y = truth.new_zeros(truth.shape[1], self.cell.hidden_size), torch.zeros_like(truth[0])
        loss = truth.new_zeros(())
        for t in range(truth.shape[0]):
            h = self.cell(y, h)
            loss = loss + (self.out(h) - truth[t]).square().mean()
            y = truth[t]
        return loss


class IteratedInside(nn.Module):
    """Time outside, a few iterations towards a fixed point inside, as deep equilibrium and predictive coding do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.feed = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            drive = self.feed(x[t])
            for _ in range(3):
                h = torch.tanh(drive + self.inside(h))
            ys.append(h)
        return torch.stack(ys)


def truth(steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, 2, 3), torch.rand(steps, 1, 1) < 0.5


def from_zoo(name: str) -> Case:
    network = ZOO[name]
    loops = tuple(steps for steps, _ in network.found)
    return Case(lambda: Net(network), network.inputs, loops, steps=network.steps, leaf=network.leaf)


CASES = {title.replace(" ", "_"): from_zoo(name) for title, name in NAMES.items()} | {
    "convolutional_spiking": Case(ConvolutionalSpiking, lambda steps: (torch.randn(steps, 2, 1, 4, 4),), loops=(9,)),
    "recurrent_spiking": Case(lambda: RecurrentLIF(3, 5, 2), lambda steps: (torch.randn(steps, 2, 3) * 3,), loops=(8,)),
    "learnable_decay": Case(LearnableDecay, lambda steps: (torch.randn(steps, 2, 4),), loops=(9,)),
    "teacher_forcing": Case(TeacherForcing, truth, loops=(8,)),
    "always_forced": Case(AlwaysForced, truth, loops=(8,)),
    "iterated_inside": Case(IteratedInside, lambda steps: (torch.randn(steps, 2, 4),), loops=(9,)),
}
