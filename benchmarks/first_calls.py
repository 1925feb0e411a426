"""How long a training script waits before its first step: ``python benchmarks/first_calls.py``.

For the networks of ``speed.py`` and torch's own layers, at their usual length, each in processes of one thread on one
core: the CPU seconds of the first training step in a process that finds nothing compiled, the C++ compiler's included;
of the first one in the next process, which finds what the one before it left; and there of the first steps at ten more
lengths, one after another. Beside them eager's first step, and a function of one line under ``torch.compile``, which
shows what torch's own compiler takes to be loaded. The result goes to ``results/first_calls.json``; a row that is
there is left alone without ``--again``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import cpu_seconds, machine, pinned, training_step
from rich.console import Console
from rich.table import Table
from speed_networks import MORE, NETWORKS
from torch import nn

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "first_calls.json"
CASES = {**NETWORKS, **{name: MORE[name] for name in ("nn.LSTM", "nn.GRU")}}
LIMIT = 1200  # seconds for one process
LENGTHS = 10
ONE_LINE = "a function of one line"
Way = Callable[[Any], Any]
WAYS: dict[str, Way] = {
    "eager": lambda network: network,
    "reroll.compile": partial(reroll.compile, time_dim=0),
    "reroll.compile, double": partial(reroll.compile, time_dim=0, schedule="double"),
}


def called(name: str, way: str, steps: int | None, core: int | None, lengths: int) -> dict[str, Any]:
    """First steps here, in a process that has done nothing else."""
    make, inputs, usual = CASES[name]
    torch.manual_seed(0)
    network, usual = make(), steps or usual
    compiled = WAYS[way](network)
    with pinned(core):
        seconds = []
        for steps in (usual, *(usual + 1 + 3 * number for number in range(lengths))):
            step = training_step(compiled, network, inputs(steps))
            begin = cpu_seconds()
            step()
            seconds.append(cpu_seconds() - begin)
    return {"first_s": seconds[0], "lengths_s": seconds[1:]}


def one_line(core: int | None) -> dict[str, Any]:
    """The first step of a function that is as small as can be, compiled by torch."""
    compiled = torch.compile(lambda x: x.sin() + 1)
    network = nn.Parameter(torch.randn(8, 8))
    with pinned(core):
        begin = cpu_seconds()
        compiled(network).sum().backward()
        return {"first_s": cpu_seconds() - begin, "lengths_s": []}


def measured(name: str, way: str, core: int) -> dict[str, Any]:
    """A first process, and the next one."""
    with tempfile.TemporaryDirectory(prefix="reroll-first-") as cache:
        folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "REROLL_CACHE_DIR": f"{cache}/reroll"}
        environment = {**os.environ, **folders, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        found = []
        for lengths in (0, LENGTHS if name != ONE_LINE and way != "eager" else 0):
            command = [sys.executable, __file__, "--row", name, way, "--core", str(core), "--lengths", str(lengths)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    return {"first_s": cold["first_s"], "next_s": warm["first_s"], "lengths_s": warm["lengths_s"]}


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", "first process", "next process", "a new length", title="CPU seconds")
    for name, ways in result["cases"].items():
        for way, row in ways["rows"].items():
            cells = (row["first_s"], row["next_s"], *([sum(row["lengths_s"]) / LENGTHS] if row["lengths_s"] else []))
            table.add_row(name, way, *(f"{each:.2f}" for each in cells))
    console.print(table)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="one process's row here, as JSON")
    parser.add_argument("--lengths", type=int, default=0, help="further lengths of that row")
    parser.add_argument("--only", nargs="*", default=[ONE_LINE, *CASES], choices=[ONE_LINE, *CASES])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--core", type=int, default=1)
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        found = one_line(given.core) if name == ONE_LINE else called(name, way, None, given.core, given.lengths)
        print(json.dumps(found))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"cases": {}}
    for name in given.only:
        if name in result["cases"] and not given.again:
            continue
        where = machine(f"python benchmarks/first_calls.py --only {name!r} --core {given.core}") | {"threads": 1}
        ways = ("torch.compile",) if name == ONE_LINE else WAYS
        rows = {way: measured(name, way, given.core) for way in ways}
        result["cases"][name] = {"environment": where, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=130))


if __name__ == "__main__":
    main()
