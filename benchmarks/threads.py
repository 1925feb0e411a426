"""One thread and several: ``python benchmarks/threads.py``.

The networks of ``speed.py``, plain BPTT and reroll without options, each with 1, 2 and 4 threads of torch. The code of
reroll's kernels is written for a number of threads, so each number has a compilation of its own. All take turns in one
process that may run on every core; wall seconds of a training step, least and median of the rounds. The machine has two
cores: four threads show what happens where there are more threads than cores. Other work on the machine counts against
whoever uses more cores: the load is kept beside the figures.

A row is saved in ``results/threads.json`` as soon as it is measured; ``--only`` names networks, ``--show`` prints.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import Step, gradients, interleaved, keep_pages, relative_error, summary, told_apart, training_step
from rich.console import Console
from rich.table import Table
from speed_networks import NETWORKS

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "threads.json"
THREADS = (1, 2, 4)


def with_threads(step: Step, threads: int) -> Callable[[], float]:
    """A step that runs with a number of threads of torch, and gives its wall seconds."""

    def run() -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return run


def row(name: str, rounds: int, threads: tuple[int, ...] = THREADS, **options: Any) -> dict[str, Any]:
    """One network with every number of threads; ``options`` are those of ``reroll.compile``."""
    torch.manual_seed(0)
    make, inputs, steps = NETWORKS[name]
    network, x = make(), inputs(steps)
    before = torch.get_num_threads()
    keep_pages()
    runs: dict[str, Callable[[], float]] = {}
    errors = {}
    expected = gradients(training_step(network, network, x), network)
    for count in threads:
        fast = reroll.compile(network, start="compiled", **options)
        runs[f"eager, {count}"] = with_threads(training_step(network, network, x), count)
        runs[f"reroll, {count}"] = with_threads(training_step(fast, network, x), count)
        for who in ("eager", "reroll"):
            errors[f"{who}, {count}"] = relative_error(gradients(runs[f"{who}, {count}"], network), expected)
    times = summary(interleaved(runs, rounds), f"eager, {threads[0]}")
    torch.set_num_threads(before)
    return {"steps": steps, "ways": {way: {"error": errors[way], **times[way]} for way in runs}}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """A row, in a process and an inductor cache of its own."""
    command = [sys.executable, __file__, "--row", name, "--rounds", str(rounds)]
    asked = f"python benchmarks/threads.py --only '{name}' --rounds {rounds}"
    found, where = told_apart(name, command, asked, threads=None)
    return {**found, "environment": where}


def show(result: dict[str, Any]) -> None:
    """A table of all rows: least and median milliseconds."""
    ways = [f"{who}, {count}" for who in ("eager", "reroll") for count in THREADS]
    table = Table("network", *ways, title="ms of a training step, median (least); threads of torch")
    for name, each in result.items():
        cells = (each["ways"][way] for way in ways)
        table.add_row(name, *(f"{1e3 * cell['median_s']:.0f} ({1e3 * cell['least_s']:.0f})" for cell in cells))
    Console(width=140).print(table)


def main() -> None:
    """Parse the options, measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of networks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--row", help="measure one network here, and print it as JSON")
    parser.add_argument("--show", action="store_true", help="print what was measured before")
    given = parser.parse_args()
    if given.row:
        print(json.dumps(row(given.row, given.rounds)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in [] if given.show else given.only or NETWORKS:
        result[name] = measured(name, given.rounds)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
