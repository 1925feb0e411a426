"""What is held where a loss is computed behind a loop, and where it is computed in it: ``python benchmarks/losses.py``.

- *language model*: an embedding, ``nn.GRU`` of two layers and a readout, trained on the next token; *large vocabulary*:
  the same with one layer and 5,000 tokens. *outside*: the loss is no part of what is compiled, *inside*: it is
  (``reroll.compile(model, loss=...)``)
- *last state*: ``nn.LSTM`` of which a readout reads the last state alone; *every 4th state*: one of four states

Local peaks and CPU seconds of a training step, one thread, ways in turns in a process of their own for each length;
median of the rounds, eager = 1. The result goes to ``results/losses.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import machine, side_by_side
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "losses.json"
ROUNDS = 9
Case = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]


class LanguageModel(nn.Module):
    """Scores of the next token."""

    def __init__(self, tokens: int, neurons: int, layers: int) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(tokens, neurons), nn.GRU(neurons, neurons, layers)
        self.readout = nn.Linear(neurons, tokens)

    def forward(self, x_TB: Tensor) -> Tensor:
        """Scores (T, B, tokens)."""
        return self.readout(self.rnn(self.table(x_TB))[0])  # type: ignore[no-any-return]


class Read(nn.Module):
    """A class for each state that is read."""

    def __init__(self, which: int | slice) -> None:
        super().__init__()
        self.which, self.rnn, self.readout = which, nn.LSTM(64, 256), nn.Linear(256, 10)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Scores (B, 10), or (rows, B, 10)."""
        return self.readout(self.rnn(x_TBI)[0][self.which])  # type: ignore[no-any-return]


def classes(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, -2), target.flatten())


def of_every_4th(y: Tensor, target_TB: Tensor) -> Tensor:
    return classes(y, target_TB[::4])


def read(steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, 32, 64), torch.randint(10, (steps, 32))


def next_token(y_TBV: Tensor, target_TB: Tensor) -> Tensor:
    return F.cross_entropy(y_TBV.flatten(0, 1), target_TB.flatten())


def language(tokens: int, neurons: int, layers: int, batch: int, steps: int) -> Case:
    x, target = (torch.randint(tokens, (steps, batch)) for _ in range(2))
    return LanguageModel(tokens, neurons, layers), next_token, (x, target)


CASES: dict[str, tuple[Callable[[int], Case], tuple[int, ...]]] = {
    "language model": (lambda steps: language(128, 128, 2, 16, steps), (512, 1024, 2048)),
    "large vocabulary": (lambda steps: language(5_000, 256, 1, 16, steps), (128,)),
    "last state": (lambda steps: (Read(-1), classes, (read(steps)[0], torch.randint(10, (32,)))), (1000,)),
    "every 4th state": (lambda steps: (Read(slice(None, None, 4)), of_every_4th, read(steps)), (1000,)),
}
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "outside, auto": (False, {}),
    "outside, double": (False, {"schedule": "double"}),
    "inside, auto": (True, {}),
    "inside, double": (True, {"schedule": "double"}),
}


def row(name: str, steps: int, rounds: int, core: int | None) -> dict[str, Any]:
    """All ways of a case at one length, here."""
    torch.manual_seed(0)
    model, loss, (x, target) = CASES[name][0](steps)
    networks, runs = {"eager": model}, {"eager": lambda: loss(model(x), target)}
    for way, (inside, options) in WAYS.items():
        twin = copy.deepcopy(model)
        if inside:
            fast = reroll.compile(twin, start="compiled", loss=loss, **options)
            runs[way] = lambda fast=fast: fast(x, target=target)  # type: ignore[misc]
        else:
            fast = reroll.compile(twin, start="compiled", **options)
            runs[way] = lambda fast=fast: loss(fast(x), target)  # type: ignore[misc]
        networks[way] = twin

    trained = {way: partial(_trained, run) for way, run in runs.items()}
    return side_by_side(trained, networks, "eager", rounds, core)


def _trained(run: Callable[[], Tensor]) -> None:
    run().backward()


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Case and length, and for each way its peak in MB and its time beside eager's."""
    made = []
    for name, lengths in result["cases"].items():
        for steps, ways in lengths.items():
            cells = (f"{each['peak'] / 1e6:.1f}, {each['time']['median_ratio']:.2f}" for each in ways["rows"].values())
            made.append((name, f"{int(steps):,}", *cells))
    return made


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("CASE", "STEPS"), help="one row here, as JSON")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="cases to measure")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    parser.add_argument("--core", type=int, default=1)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(row(given.row[0], int(given.row[1]), ROUNDS, given.core)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"cases": {}}
    for name in given.only if not given.show else ():
        for steps in CASES[name][1]:
            command = [sys.executable, __file__, "--row", name, str(steps), "--core", str(given.core)]
            told = subprocess.run(command, capture_output=True, text=True, check=True)
            where = machine(f"python benchmarks/losses.py --core {given.core}") | {"threads": 1}
            rows = json.loads(told.stdout.splitlines()[-1])
            result["cases"].setdefault(name, {})[str(steps)] = {"rows": rows, "environment": where}
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    shown = Table("case", "T", "eager", *WAYS, title="MB, and time (eager = 1)")
    for cells in table(result):
        shown.add_row(*cells)
    Console(width=130).print(shown)


if __name__ == "__main__":
    main()
