"""Loops whose steps speak with other processes. Shape letters: T steps, B batch, I inputs, H neurons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce


def mean(value: Tensor) -> Tensor:
    """The mean of all processes' values, with a gradient."""
    world: Any = dist.group.WORLD
    together: Tensor = all_reduce(value, "sum", world)
    return together / dist.get_world_size()


def gathered(value: Tensor) -> Tensor:
    """The mean by way of all values: as many messages, of another kind."""
    world: Any = dist.group.WORLD
    rows: Tensor = all_gather_tensor_autograd(value, 0, world)
    return rows.reshape(dist.get_world_size(), *value.shape).mean(0)


def normalised(value: Tensor) -> Tensor:
    """Less the mean over the batches of all processes, which may be of different sizes."""
    return value - mean(value.mean(0))


def without_gradient(value: Tensor) -> Tensor:
    """Less a mean that is taken for a constant, by a collective in place."""
    taken = value.detach().clone()
    dist.all_reduce(taken)
    return value - taken / 8


def in_place(value: Tensor) -> Tensor:
    """A collective in place, whose gradient eager passes by."""
    value = value.clone()
    dist.all_reduce(value)
    return value


class Speaking(nn.Module):
    """A GRU cell, and what is ``together`` of its state: (T, B, I) to (B, H)."""

    def __init__(self, together: Callable[[Tensor], Tensor] = mean, inputs: int = 6) -> None:
        super().__init__()
        self.cell, self.together = nn.GRUCell(inputs, 5), together

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.cell(x_TBI[t], h_BH) + self.together(h_BH))
        return h_BH
