"""Train a spiking network on handwritten digits under Double Checkpointing, and measure it beside plain BPTT.

It ends with an error if the accuracy is missed, or if the losses differ from those of plain BPTT.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts.memory_curves import live_bytes, plot
from parts.spiking import Data, Network, digits, spike_trains
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import reroll


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="time steps per image")
    parser.add_argument("--neurons", type=int, default=128)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=220, help="updates")
    parser.add_argument("--schedule", default="double", help="standard, remote, hierarchical or double")
    parser.add_argument("--lowering", default="inductor", help="inductor or eager")
    parser.add_argument("--accuracy", type=float, default=0.93, help="least accuracy on held-out digits")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("out") / "digits.png")
    return parser.parse_args()


def train(model: Any, network: Network, data: Data, args: argparse.Namespace, rounds: int) -> list[float]:
    """The losses of training ``network``; ``model`` is the network, or what torch.compile made of it."""
    optimizer, losses = torch.optim.Adam(network.parameters(), lr=5e-3), []
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, rounds)
    for _ in track(range(rounds), f"plain BPTT, {rounds} rounds" if model is network else f"reroll, {rounds} rounds"):
        chosen = torch.randint(len(data[1]), (args.batch,))
        loss = cross_entropy(model(spike_trains(data[0][chosen], args.steps)), data[1][chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay.step()
        losses.append(loss.item())
    return losses


def first_losses(lowering: str | None, data: Data, args: argparse.Namespace) -> list[float]:
    """The first 20 losses, in float64 (float32 drifts), by reroll with a lowering or by plain BPTT."""
    torch.manual_seed(1)
    network = Network(args.neurons).double()
    options = {"schedule": args.schedule, "lowering": lowering}
    model = torch.compile(network, backend="reroll", options=options) if lowering else network
    return train(model, network, (data[0].double(), data[1]), args, rounds=20)


def step(model: Any, x_TBI: Tensor, y_B: Tensor) -> None:
    cross_entropy(model(x_TBI), y_B).backward()


def main() -> str | None:
    """Give a sentence if the result is not as promised."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, (x_NI, y_N) = digits()
    plain, rolled = first_losses(None, data, args), first_losses("eager", data, args)
    off = max(abs(a - b) / abs(b) for a, b in zip(rolled, plain, strict=True))
    print(f"First 20 losses, eager lowering, float64: largest relative difference to plain BPTT {off:.1e}")
    network = Network(args.neurons)
    options = {"schedule": args.schedule, "lowering": args.lowering, "start": "compiled"}  # what is measured below
    model = torch.compile(network, backend="reroll", options=options)
    train(model, network, data, args, args.rounds)
    with torch.no_grad():
        accuracy = (network(spike_trains(x_NI, args.steps)).argmax(1) == y_N).double().mean().item()
    print(f"Accuracy on {len(y_N)} held-out digits: {accuracy:.3f}")
    curves = {}
    for name, each in {"plain BPTT": network, "reroll": model}.items():
        call = partial(step, each, spike_trains(data[0][: args.batch], args.steps), data[1][: args.batch])
        network.zero_grad()
        cost = reroll.measure(call, exclude=[network])
        curves[name] = live_bytes(call)
        print(f"{name:10} {cost.seconds:.2f} CPU s a step, local peak {cost.local_peak / 1e6:.2f} MB")
    plot(curves, f"One training step of {args.steps} time steps", args.out)
    print(f"Memory curves: {args.out}")
    if off > 1e-9:
        return f"The losses differ from plain BPTT's by {off:.1e}, which is more than rounding. Please report it."
    return None if accuracy >= args.accuracy else f"Accuracy {accuracy:.3f} is below {args.accuracy}. Train for longer."


if __name__ == "__main__":
    raise SystemExit(main())
