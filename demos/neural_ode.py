"""A neural ODE: a network learns a law of motion from trajectories, by Runge-Kutta of fourth order in a plain loop.

The law is a spiral (Chen et al., 2018, arXiv 1806.07366). Gradients pass through all 1,000 steps, without an adjoint
equation. Training begins with short trajectories: one compiled model serves every length. It ends with an error if the
gradients differ from plain BPTT's, or if the error stays large. T steps, B trajectories, D = 2 coordinates.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts.memory_curves import live_bytes, plot_path
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import reroll

SPIRAL = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


class Flow(nn.Module):
    """Where a law of motion leads; it is told the cubes of the coordinates."""

    def __init__(self, law: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.law = law

    def forward(self, y_BD: Tensor, h_T: Tensor) -> Tensor:
        """States (T, B, D) after each of the steps, which take h_T, from y_BD."""
        path = []
        for t in range(h_T.shape[0]):
            h = h_T[t]
            k1 = self.law(y_BD**3)
            k2 = self.law((y_BD + h / 2 * k1) ** 3)
            k3 = self.law((y_BD + h / 2 * k2) ** 3)
            k4 = self.law((y_BD + h * k3) ** 3)
            y_BD = y_BD + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y_BD)
        return torch.stack(path)


def trajectories(count: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places around (0, 0) to begin from, how long steps take, and where the spiral leads."""
    angle_B1, h_T = 2 * torch.pi * torch.rand(count, 1), torch.full((steps,), 0.01)
    y_BD = (0.5 + torch.rand(count, 1)) * torch.cat([angle_B1.cos(), angle_B1.sin()], dim=1)
    return y_BD, h_T, Flow(lambda cubes_BD: cubes_BD @ SPIRAL)(y_BD, h_T)


def step(model: Any, y_BD: Tensor, h_T: Tensor, truth_TBD: Tensor) -> float:
    loss = mse_loss(model(y_BD, h_T), truth_TBD)
    loss.backward()
    return loss.item()


def train(model: Any, steps: int, rounds: int) -> float:
    optimizer, errors = torch.optim.Adam(model.parameters(), lr=1e-2), []
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, rounds)
    for _ in track(range(rounds), f"{rounds} updates at T={steps}"):
        optimizer.zero_grad()
        errors.append(step(model, *trajectories(16, steps)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
    print(f"Mean square error at T={steps}: {errors[0]:.4f} at first, {errors[-1]:.4f} at last")
    return errors[-1]


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100, help="updates at steps / 50, steps / 10 and steps")
    parser.add_argument("--lowering", default="inductor", help="inductor or eager")
    parser.add_argument("--error", type=float, default=0.01, help="largest mean square error")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("out") / "neural_ode.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    flow = Flow(nn.Sequential(nn.Linear(2, args.units), nn.Tanh(), nn.Linear(args.units, 2)))
    model = reroll.compile(flow, schedule="standard", lowering=args.lowering)
    last = [train(model, steps, args.rounds) for steps in (args.steps // 50, args.steps // 10, args.steps)][-1]
    y_BD, h_T, truth_TBD = trajectories(16, args.steps)
    print(check := reroll.check(model, y_BD, h_T, loss=partial(mse_loss, target=truth_TBD)))
    curves = {}
    for name, each in {"plain BPTT": flow, "reroll": model}.items():
        curves[name] = live_bytes(partial(step, each, y_BD, h_T, truth_TBD))
    plot_path(truth_TBD[:, 0], flow(y_BD, h_T)[:, 0].detach(), curves, args.out)
    print(f"A trajectory and the memory of a training step: {args.out}")
    if not check.equal:
        return "The gradients differ from plain BPTT's by more than rounding. Please report it."
    return None if last <= args.error else f"The error {last:.4f} is above {args.error}. Train for more rounds."


if __name__ == "__main__":
    raise SystemExit(main())
