"""Train a GPT of characters on Python's own sources, in a fifth of the memory that plain PyTorch takes for it.

It ends with an error if the budget is not kept, if the gradients differ from those of plain PyTorch, or if the loss
stays above ``--loss``.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts.characters import CharacterGPT, batch, library, loss_of, step, write
from parts.memory_curves import live_bytes, plot
from rich.progress import track
from torch import Tensor, nn

import reroll


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="characters that the network sees")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=250, help="updates")
    parser.add_argument("--share", type=float, default=0.2, help="the budget, as a part of what plain PyTorch holds")
    parser.add_argument("--lowering", default="inductor", help="inductor or eager")
    parser.add_argument("--loss", type=float, default=2.5, help="the most that the last losses may be on average")
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("out") / "gpt.png")
    return parser.parse_args()


def train(model: Any, network: nn.Module, text_N: Tensor, args: argparse.Namespace) -> list[float]:
    """The losses of training ``network``; ``model`` is what reroll made of it."""
    optimizer, losses = torch.optim.AdamW(network.parameters(), lr=2e-3), []
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.rounds)
    for _ in track(range(args.rounds), f"{args.rounds} rounds"):
        loss = loss_of(model, batch(text_N, args.batch, args.length))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay.step()
        losses.append(loss.item())
    return losses


def gradients(model: Any, network: nn.Module, text_BS: Tensor) -> list[Tensor]:
    network.zero_grad()
    step(model, text_BS)
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in network.parameters()]


def main() -> str | None:
    """Give a sentence if the result is not as promised."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text_N = library()
    network = CharacterGPT(args.blocks, args.width, args.length)
    example = batch(text_N, args.batch, args.length)
    expected = gradients(network, network, example)
    network.zero_grad()
    plain = reroll.measure(partial(step, network, example), exclude=[network])
    budget = int(args.share * plain.local_peak)
    model = reroll.compile(network, memory_budget=budget, lowering=args.lowering, start="compiled")
    print(f"{len(text_N):,} characters, budget {budget / 1e6:.1f} MB. The first block is compiled ...")
    off = max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))
        for ours, theirs in zip(gradients(model, network, example), expected, strict=True)
    )
    print(f"Gradients: largest relative difference to plain PyTorch {off:.1e}")
    losses = train(model, network, text_N, args)
    last = sum(losses[-10:]) / len(losses[-10:])
    print(f"Loss: {losses[0]:.2f} at first, {last:.2f} in the last rounds. It writes:\n")
    print(write(network, "def ", args.sample, args.length), "\n")
    curves, peaks = {}, {}
    for name, each in {"plain PyTorch": network, "reroll": model}.items():
        call = partial(step, each, example)
        network.zero_grad()
        cost = reroll.measure(call, exclude=[network])
        curves[name], peaks[name] = live_bytes(call), cost.local_peak
        print(f"{name:13} {cost.seconds:.2f} CPU s a step, local peak {cost.local_peak / 1e6:.2f} MB")
    plot(curves, f"One training step of {args.blocks} blocks", args.out)
    print(f"Memory curves: {args.out}")
    if off > 1e-3:
        return f"The gradients differ from plain PyTorch's by {off:.1e}, which is more than rounding. Please report it."
    if peaks["reroll"] > budget:
        return f"The local peak is {peaks['reroll']:,} bytes, above the budget of {budget:,}. Please report it."
    return None if last <= args.loss else f"The loss {last:.2f} is above {args.loss}. Train for longer."


if __name__ == "__main__":
    raise SystemExit(main())
