"""Truncated BPTT, by hand and by ``truncate=k``: ``python benchmarks/truncated.py``.

The language model of ``losses.py`` with its loss, whose states are detached every 64 steps. *by hand*: in eager, piece
by piece, each with its own backward. *plain BPTT* gives other gradients, and is there for its memory and its time.

Local peaks and CPU seconds of a training step, one thread, ways in turns in a process of their own for each length;
median of the rounds, by hand = 1. Errors are against by hand. The result goes to ``results/truncated.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from losses import LanguageModel, next_token
from measuring import machine, side_by_side
from rich.console import Console
from rich.table import Table
from torch import Tensor

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "truncated.json"
ROUNDS, EVERY, LENGTHS = 9, 64, (1024, 4096)
TOKENS, NEURONS, BATCH = 128, 128, 16
WAYS: dict[str, dict[str, Any]] = {"truncate": {}, "truncate, double": {"schedule": "double"}}


def by_hand(model: LanguageModel, x_TB: Tensor, target_TB: Tensor, every: int) -> None:
    """Forward and backward of one piece after another."""
    state = None
    for piece, target in zip(x_TB.split(every), target_TB.split(every), strict=True):
        y_TBH, state = model.rnn(model.table(piece), state)
        scores = model.readout(y_TBH).flatten(0, 1)
        (F.cross_entropy(scores, target.flatten(), reduction="sum") / target_TB.numel()).backward()
        state = state.detach()


def row(steps: int, rounds: int, core: int | None, every: int = EVERY) -> dict[str, Any]:
    """All ways at one length, here."""
    torch.manual_seed(0)
    model = LanguageModel(TOKENS, NEURONS, 2)
    x, target = (torch.randint(TOKENS, (steps, BATCH)) for _ in range(2))
    networks = {way: copy.deepcopy(model) for way in ("by hand", "plain BPTT", *WAYS)}
    hand, plain = networks["by hand"], networks["plain BPTT"]
    runs: dict[str, Callable[[], None]] = {
        "by hand": lambda: by_hand(hand, x, target, every),
        "plain BPTT": lambda: next_token(plain(x), target).backward(),
    }
    for way, options in WAYS.items():
        fast = reroll.compile(networks[way], start="compiled", loss=next_token, truncate=every, **options)
        runs[way] = lambda fast=fast: fast(x, target=target).backward()  # type: ignore[misc]

    return side_by_side(runs, networks, "by hand", rounds, core)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, metavar="STEPS", help="one row here, as JSON")
    parser.add_argument("--core", type=int, default=1)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(row(given.row, ROUNDS, given.core)))
        return
    result: dict[str, Any] = {"every": EVERY, "lengths": {}}
    shown = Table("T", "way", "MB", "time (by hand = 1)", "error against by hand")
    for steps in LENGTHS:
        command = [sys.executable, __file__, "--row", str(steps), "--core", str(given.core)]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = json.loads(told.stdout.splitlines()[-1])
        where = machine(f"python benchmarks/truncated.py --core {given.core}") | {"threads": 1}
        result["lengths"][str(steps)] = {"rows": rows, "environment": where}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        for way, each in rows.items():
            ratio = each["time"]["median_ratio"]
            shown.add_row(f"{steps:,}", way, f"{each['peak'] / 1e6:.1f}", f"{ratio:.2f}", f"{each['error']:.0e}")
    Console(width=130).print(shown)


if __name__ == "__main__":
    main()
