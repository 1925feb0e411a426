"""The adding problem (Hochreiter and Schmidhuber, 1997) over 1,000 steps, with a GRU cell in a plain loop.

Every step brings a random number, and two of them are marked; the answer is the sum of these two. Always answering 1
has a mean square error of 0.167. From scratch a GRU stays there for very long at this length. So it warms up on
shorter sequences: one compiled model serves them all. T time steps, B batch, I = 2 inputs, H units.
"""

import argparse
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import reroll


class Adder(nn.Module):
    """A GRU cell whose units forget over 1 to ``horizon`` steps at first (Tallec and Ollivier, arXiv 1804.11188)."""

    def __init__(self, units: int, horizon: int) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, units), nn.Linear(units, 1)
        nn.init.zeros_(self.cell.bias_hh)
        with torch.no_grad():
            self.cell.bias_ih[units : 2 * units] = torch.empty(units).uniform_(1, horizon - 1).log()

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Answers (B) to sequences (T, B, 2)."""
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], self.cell.hidden_size)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
        answers_B: Tensor = self.out(h_BH).squeeze(1)
        return answers_B


def sequences(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    """Numbers and marks (T, B, 2), one mark in each half, and the sums of the marked numbers."""
    numbers_TB, marks_TB = torch.rand(steps, batch), torch.zeros(steps, batch)
    marks_TB.scatter_(
        0, torch.stack([torch.randint(steps // 2, (batch,)), torch.randint(steps // 2, steps, (batch,))]), 1
    )
    return torch.stack([numbers_TB, marks_TB], dim=2), (numbers_TB * marks_TB).sum(0)


def step(model: Any, x_TBI: Tensor, sum_B: Tensor) -> None:
    mse_loss(model(x_TBI), sum_B).backward()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, args: argparse.Namespace, rounds: int) -> None:
    for _ in track(range(rounds), f"{rounds} updates at T={steps}"):
        x_TBI, sum_B = sequences(steps, args.batch)
        optimizer.zero_grad()
        step(model, x_TBI, sum_B)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()


def error(network: Adder, steps: int) -> float:
    with torch.no_grad():
        x_TBI, sum_B = sequences(steps, 500)
        return mse_loss(network(x_TBI), sum_B).item()


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=300, help="updates at steps / 20, and as many at steps / 5")
    parser.add_argument("--rounds", type=int, default=150, help="updates at the full length")
    parser.add_argument("--schedule", default="standard")
    parser.add_argument("--lowering", default="inductor", help="inductor or eager")
    parser.add_argument("--error", type=float, default=0.05, help="largest mean square error")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = Adder(args.units, args.steps)
    model = reroll.compile(network, schedule=args.schedule, lowering=args.lowering, start="compiled")
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for steps in (args.steps // 20, args.steps // 5):
        train(model, optimizer, steps, args, args.warm_up)
    print(f"Mean square error at T={args.steps} after the warm-up: {error(network, args.steps):.4f}")
    train(model, optimizer, args.steps, args, args.rounds)
    found = error(network, args.steps)
    print(f"... and after training at the full length: {found:.4f}")
    x_TBI, sum_B = sequences(args.steps, args.batch)
    for name, each in {"plain BPTT": network, "reroll": model}.items():
        network.zero_grad()
        cost = reroll.measure(partial(step, each, x_TBI, sum_B), exclude=[network])
        print(f"{name:12} {cost.seconds:.2f} CPU s a step, local peak {cost.local_peak / 1e6:.2f} MB")
    return None if found <= args.error else f"The error {found:.3f} is above {args.error}. Train for more rounds."


if __name__ == "__main__":
    raise SystemExit(main())
