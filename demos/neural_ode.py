"""A neural ODE: a small network learns a law of motion from trajectories, by Runge-Kutta of fourth order in a plain loop.

The law is a spiral (Chen et al., 2018, arXiv 1806.07366). A loss on 1,000 steps of Runge-Kutta is differentiated through
all of them, which are exact gradients of what was computed. Training begins with short trajectories: one compiled model
serves every length. It ends with an error if the gradients differ from plain BPTT's, or if the error stays large.

T steps, B trajectories, D = 2 coordinates.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from parts.memory_curves import COLOURS, draw, live_bytes
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import reroll


class Flow(nn.Module):
    """Where a law of motion leads: states (T, B, D) after each of the steps, which take h_T."""

    def __init__(self, law: nn.Module) -> None:
        super().__init__()
        self.law = law

    def forward(self, y_BD: Tensor, h_T: Tensor) -> Tensor:
        """Runge-Kutta of fourth order, from y_BD."""
        path = []
        for t in range(h_T.shape[0]):
            h = h_T[t]
            k1 = self.law(y_BD)
            k2 = self.law(y_BD + h / 2 * k1)
            k3 = self.law(y_BD + h / 2 * k2)
            k4 = self.law(y_BD + h * k3)
            y_BD = y_BD + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y_BD)
        return torch.stack(path)


class Spiral(nn.Module):
    """The law to learn."""

    def forward(self, y_BD: Tensor) -> Tensor:
        """The speed at a place."""
        return y_BD**3 @ y_BD.new_tensor([[-0.1, 2.0], [-2.0, -0.1]])


def starts(count: int) -> Tensor:
    """Places around (0, 0) to begin from."""
    angle_B = 2 * torch.pi * torch.rand(count)
    return (1 + torch.rand(count, 1)) * torch.stack([angle_B.cos(), angle_B.sin()], dim=1)


def step(model: Any, y_BD: Tensor, h_T: Tensor, truth_TBD: Tensor) -> None:
    mse_loss(model(y_BD, h_T), truth_TBD).backward()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, args: argparse.Namespace) -> float:
    """Learn from trajectories of so many steps; the mean error of the last ten updates."""
    errors = []
    ...
