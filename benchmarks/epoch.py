"""What the first epochs of a training script wait for: ``python benchmarks/epoch.py``.

Three epochs of training batches, a smaller last one, evaluation, and its smaller last batch, in a new process of one
thread: cold, with empty caches of inductor and of reroll, then in the next process with what that left. By call the
seconds that the process waits, by the clock, on two cores; for the whole the CPU seconds of the process and of all that
it began (the C++ compiler, what compiles ahead).

The result goes to ``results/epoch.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import alone, cpu_seconds, empty_caches, machine
from rich.console import Console
from rich.table import Table
from speed_networks import MORE, NETWORKS

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "epoch.json"
ALL = {**NETWORKS, **MORE}
NAMES = ("recurrent LIF (D2r)", "LSTM cell")
STEPS, EPOCHS, TRAINING, EVALUATION = 100, 3, 12, 3
LIMIT = 1800  # seconds for one process
Way = Callable[[Any], Any]
WAYS: dict[str, Way] = {
    "eager": lambda network: network,
    "reroll": partial(reroll.compile, time_dim=0),
    "reroll, proof=never": partial(reroll.compile, time_dim=0, proof="never"),
    "reroll, start=compiled": partial(reroll.compile, time_dim=0, start="compiled"),
    "torch.compile": torch.compile,
}


def batches(x_TBI: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
    """The batches of an epoch, and whether they train: the last ones are two thirds as large."""
    last_TBI = x_TBI[:, : 2 * x_TBI.shape[1] // 3].contiguous()
    for training, count in ((True, TRAINING), (False, EVALUATION)):
        yield from ((x_TBI, training) for _ in range(count))
        yield last_TBI, training


def row(name: str, way: str) -> dict[str, Any]:
    """Seconds of each call, by epoch, and CPU seconds of all, in a process that has done nothing else."""
    make, inputs, _ = ALL[name]
    torch.manual_seed(0)
    network, x_TBI = make(), inputs(STEPS)
    compiled, epochs = WAYS[way](network), []
    optimizer, before = torch.optim.SGD(network.parameters(), lr=1e-3), cpu_seconds()
    for _ in range(EPOCHS):
        epochs.append(list[float]())
        for batch_TBI, training in batches(x_TBI):
            begin = time.perf_counter()
            network.train(training)
            with torch.set_grad_enabled(training):
                y = compiled(batch_TBI)
            if training:
                optimizer.zero_grad()
                y.square().mean().backward()
                optimizer.step()
            epochs[-1].append(time.perf_counter() - begin)
    return {"calls_s": epochs, "cpu_s": cpu_seconds() - before}


def measured(name: str, way: str) -> dict[str, Any]:
    """The seconds of the calls, cold and in the next process; empty without an answer."""
    found = dict[str, Any]()
    command = [sys.executable, __file__, "--row", name, way]
    with empty_caches() as caches:
        for kind in ("cold", "next"):
            try:
                found[kind] = json.loads(alone(command, LIMIT, caches).stdout.splitlines()[-1])
            except subprocess.TimeoutExpired:
                return {}
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", title=f"Seconds, T={STEPS}")
    for kind in ("cold", "next"):
        for what in ("first epoch", "longest call", "all epochs", "CPU"):
            table.add_column(f"{kind}: {what}", justify="right")
    for name, ways in result.items():
        for way, found in ways["rows"].items():
            cells = list[float]()
            for each in (found[kind] for kind in ("cold", "next") if kind in found):
                epochs = each["calls_s"]
                cells += [sum(epochs[0]), max(map(max, epochs)), sum(map(sum, epochs)), each["cpu_s"]]
            table.add_row(name, way, *(f"{value:.2f}" for value in cells))
    console.print(table)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="calls here, as JSON")
    parser.add_argument("--only", nargs="*", default=NAMES, choices=list(ALL), help="networks to measure")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        print(json.dumps(row(name, way)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in () if given.show else given.only:
        where = machine(f"python benchmarks/epoch.py --only {name!r}") | {"threads": 1}
        result[name] = {"environment": where, "rows": {way: measured(name, way) for way in WAYS}}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=150))


if __name__ == "__main__":
    main()
