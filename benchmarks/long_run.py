"""Whether long training stays as good as plain BPTT's: ``python benchmarks/long_run.py``.

``demos/spoken_digits.py`` for 2,000 updates at T=1,000, by reroll and by plain BPTT, from the same weights and on the
same words, for several seeds. Every seed has words, speakers and weights of its own. Losses part in the end, as spikes
are decisions; accuracies should not, by more than seeds differ.

``results/spoken_digits.json`` keeps both ways of a seed as they end, so several seeds may run at a time
(``--seeds 0``, ``--seeds 1``), and what is there is not trained again. ``--show`` only prints and draws
``results/spoken_digits.png``. A seed took 15 minutes of CPU, nearly all of it plain BPTT's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from measuring import cost_of, machine
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

import reroll

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demos"))
from parts.learning import History, plot, smoothed
from parts.spoken import Listener, Words
from spoken_digits import arguments, train, words_of

RESULT = Path(__file__).resolve().parent / "results" / "spoken_digits.json"
WAYS = ("reroll", "plain BPTT")


def way(name: str, network: nn.Module, words: tuple[Words, Words], args: argparse.Namespace) -> dict[str, Any]:
    """One training, with the local peak and the CPU seconds of a step."""
    compiled = reroll.compile(network, start="compiled", memory_budget=args.budget * 1024, lowering=args.lowering)
    model: Any = compiled if name == "reroll" else network
    history = train(name, model, network, words, args)
    x_TBC, y_B = words[0][0][:, : args.batch].float(), words[0][1][: args.batch]
    network.zero_grad()
    cost = cost_of(lambda: cross_entropy(model(x_TBC), y_B).backward(), [network])
    return {
        "accuracies": {str(number): round(each, 4) for number, each in history.accuracies.items()},
        "losses": [round(each, 4) for each in history.losses],
        "seconds_per_update": history.seconds_per_update,
        "local_peak": cost.local_peak,
    }


def save(path: Path, seed: int, name: str, found: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Add one training to the file, which another seed may have written meanwhile."""
    new = {"sizes": sizes, "environment": machine("python benchmarks/long_run.py")}
    result = (json.loads(path.read_text("utf-8")) if path.exists() else {}) | new
    result.setdefault("seeds", {}).setdefault(str(seed), {})[name] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")


def seed_row(args: argparse.Namespace, out: Path) -> None:
    """Both ways from one seed, and how far gradients are from plain BPTT's in float64."""
    torch.manual_seed(args.seed)
    words = words_of(args)
    network = Listener(args.channels, args.neurons)
    exact = reroll.compile(copy.deepcopy(network).double(), memory_budget=args.budget * 1024, lowering="eager")
    first = words[0][0][:, :: len(words[0][1]) // args.batch].double()
    check = reroll.check(exact, first, measure=False)
    sizes = {name: getattr(args, name) for name in ("steps", "channels", "neurons", "batch", "rounds")}
    sizes["budget"] = f"{args.budget}KiB"
    for name in WAYS:
        found = way(name, copy.deepcopy(network), words, args)
        save(out, args.seed, name, found | {"gradients_off": check.error}, sizes)


def show(out: Path) -> None:
    """A table of all seeds, and the plot."""
    result = json.loads(out.read_text("utf-8"))
    table = Table("seed", "way", "accuracy", "loss at the end", "CPU s an update", "local peak")
    histories, last = list[History](), dict[str, list[float]]()
    for seed, row in sorted(result["seeds"].items()):
        for name, found in row.items():
            counted = {int(number): each for number, each in found["accuracies"].items()}
            history = History(name, found["losses"], [found["seconds_per_update"]], counted)
            histories.append(history)
            last.setdefault(name, []).append(history.accuracy)
            loss, peak = smoothed(history.losses)[-1], f"{found['local_peak'] / 1e6:.2f} MB"
            cost = f"{history.seconds_per_update:.3f}"
            table.add_row(seed, name, f"{history.accuracy:.3f}", f"{loss:.3f}", cost, peak)
    for name, values in last.items():
        spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        table.add_row("all", name, f"{statistics.mean(values):.3f}{spread}", "", "", "")
    Console().print(table)
    title = f"{result['sizes']['rounds']:,} updates at T={result['sizes']['steps']:,}, {len(result['seeds'])} seeds"
    plot(histories, title, out.with_suffix(".png"))


def main(command: list[str] | None = None) -> None:
    """Train what is missing, save, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--show", action="store_true", help="only print and draw")
    parser.add_argument("--demo", nargs="*", default=[], help="more arguments of the demo: steps=100 neurons=16")
    asked = parser.parse_args(command)
    torch.set_num_threads(1)
    there = json.loads(asked.out.read_text("utf-8"))["seeds"] if asked.out.exists() else {}
    for seed in () if asked.show else asked.seeds:
        if set(there.get(str(seed), {})) < set(WAYS):
            more = [f"--{each}" for each in asked.demo]
            every = f"--every={max(asked.rounds // 20, 1)}"
            seed_row(arguments([f"--seed={seed}", f"--rounds={asked.rounds}", every, *more]), asked.out)
    show(asked.out)


if __name__ == "__main__":
    main()
