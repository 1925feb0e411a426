"""A recurrent spiking network that tells 20 spoken words apart, over 1,000 steps and within a memory budget.

The words are made by a generator, in the manner of the Spiking Heidelberg Digits. The same training is done by plain
BPTT and by reroll, from the same weights and on the same words. It ends with an error if the gradients differ, if the
budget is not kept, or if the accuracy is missed. `benchmarks/long_run.py` does this for longer and for several seeds.
"""

import argparse
import copy
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from parts.learning import History, plot
from parts.spoken import WORDS, Listener, Words, recordings, vocabulary
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import reroll


def arguments(command: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="time steps of a word")
    parser.add_argument("--channels", type=int, default=70, help="700 in Heidelberg's")
    parser.add_argument("--neurons", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300, help="updates")
    parser.add_argument("--every", type=int, default=50, help="updates from one look at the accuracy to the next")
    parser.add_argument("--speakers", type=int, default=60, help="recordings of each word to train on")
    parser.add_argument("--budget", type=int, default=512, help="KiB for reroll")
    parser.add_argument("--lowering", default="inductor", help="inductor or eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accuracy", type=float, default=0.6, help="least accuracy on held-out recordings")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("out") / "spoken_digits.png")
    return parser.parse_args(command)


def train(name: str, model: Any, network: nn.Module, words: tuple[Words, Words], args: argparse.Namespace) -> History:
    """What training ``network`` was like; ``model`` is the network, or what reroll made of it."""
    (x_TNC, y_N), (held_TNC, held_N) = words
    history, optimizer = History(name), torch.optim.Adam(network.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.rounds)
    torch.manual_seed(args.seed)
    for number in track(range(args.rounds), f"{name}, {args.rounds} updates"):
        chosen = torch.randint(len(y_N), (args.batch,))
        began = process_time()
        optimizer.zero_grad()
        loss = cross_entropy(model(x_TNC[:, chosen].float()), y_N[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay.step()
        history.add(loss.item(), process_time() - began)
        if (number + 1) % args.every == 0 or number + 1 == args.rounds:
            with torch.no_grad():
                history.judge(network(held_TNC.float()).argmax(1) == held_N)
    return history


def step(model: Any, x_TBC: Tensor, y_B: Tensor) -> None:
    cross_entropy(model(x_TBC), y_B).backward()


def words_of(args: argparse.Namespace) -> tuple[Words, Words]:
    spoken = vocabulary(args.steps)
    return recordings(spoken, args.speakers, args.channels), recordings(spoken, 15, args.channels)


def main() -> str | None:
    """Give a sentence if the result is not as promised."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    words = words_of(args)
    plain = Listener(args.channels, args.neurons)
    network, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    options = {"memory_budget": args.budget * 1024, "lowering": args.lowering, "start": "compiled"}
    x_TBC, y_B = words[1][0][:, :: WORDS - 1].float(), words[1][1][:: WORDS - 1]  # some of each word
    check = reroll.check(reroll.compile(exact, **options), x_TBC.double(), measure=False)
    print(f"In float64, against plain BPTT: {check}")
    models, histories, peaks = {"plain BPTT": plain, "reroll": reroll.compile(network, **options)}, [], []
    for (name, model), each in zip(models.items(), (plain, network), strict=True):
        histories.append(train(name, model, each, words, args))
        each.zero_grad()
        peaks.append(reroll.measure(partial(step, model, x_TBC, y_B), exclude=[each]).local_peak)
        print(f"{histories[-1]}, local peak {peaks[-1] / 1e6:.2f} MB")
    plot(histories, f"{args.rounds} updates at T={args.steps}", args.out)
    if not check.equal or peaks[1] > args.budget * 1024:
        return "The gradients differ, or the budget is not kept. Please report it."
    enough = histories[1].accuracy >= args.accuracy
    return None if enough else f"The accuracy is below {args.accuracy}. Train for longer."


if __name__ == "__main__":
    raise SystemExit(main())
