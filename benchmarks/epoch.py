"""What the first epochs of a training script wait for: ``python benchmarks/epoch.py``.

Three epochs of training batches, a smaller last one, evaluation, and its smaller last batch, in a new process of one
thread: *cold*, with empty caches of inductor and of reroll, then in the *next* process with what that left. And cold,
in a process of its own, 200 training steps at one size of the batch. By call the seconds that the process waits, by
the clock; for the whole the CPU seconds of the process and of all that it began (the C++ compiler, what compiles
ahead). Processes run one after another. What reroll compiles ahead runs beside its process on whatever cores this one
may use: give it two, as a user's has. The other ways use one core at a time; their rows say on how many they ran
(``allowed``), which is one where the command was begun by ``taskset -c 1``.

    python benchmarks/epoch.py --jax build/jax/bin/python     # all rows; goes on where it was stopped
    python benchmarks/epoch.py --ways reroll --again          # one way anew
    python benchmarks/epoch.py --show

JAX keeps what it compiled for the next process, too (``JAX_COMPILATION_CACHE_DIR``), which it does not do by default.
A process that gives no answer within ten minutes is ended, and the row says so. The networks are those of
``epoch_networks.py``; the result goes to ``results/epoch.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from door_networks.case import Network
from doors import loss_of
from epoch_networks import SCRIPTS, smaller
from measuring import alone, cpu_seconds, empty_caches, machine
from rich.console import Console
from rich.table import Table

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "epoch.json"
LIMIT = 600  # seconds for one process
RATE = 1e-5
Epochs = list[list[tuple[bool, bool]]]
"""Calls by epoch: whether the batch is a whole one, and whether it trains."""
Way = Callable[[Network], Callable[..., Any]]
Row = dict[str, Any]


def ours(network: Network, **options: Any) -> Any:
    """By reroll, as the network's user names its loop."""
    return reroll.compile(network.run, **network.how, **options)


JAX = "JAX lax.scan"
WAYS: dict[str, Way] = {
    "eager": lambda network: network.run,
    "reroll": ours,
    "reroll, proof=never": partial(ours, proof="never"),
    "reroll, start=compiled": partial(ours, start="compiled"),
    "torch.compile": lambda network: torch.compile(network.run),
    "torch.compile, dynamic=True": lambda network: torch.compile(network.run, dynamic=True),
}
KINDS: dict[str, Epochs] = {
    "cold": [[(True, True)] * 12 + [(False, True)] + [(True, False)] * 3 + [(False, False)]] * 3,
    "200 steps": [[(True, True)] * 200],
}


def row(name: str, way: str, epochs: Epochs) -> Row:
    """Seconds of each call, by epoch, CPU seconds of all, and the last loss, in a process that has done nothing else."""
    torch.manual_seed(0)
    network = SCRIPTS[name].make()
    batches = (smaller(network.inputs, SCRIPTS[name].dims), network.inputs)
    parameters = [each for part in network.parts for each in torch.nn.Module.parameters(part)]
    optimizer, seconds, loss = torch.optim.SGD(parameters, lr=RATE), list[list[float]](), torch.zeros(())
    before, run = cpu_seconds(), WAYS[way](network)
    for epoch in epochs:
        seconds.append([])
        for whole, training in epoch:
            begin = time.perf_counter()
            for part in network.parts:
                part.train(training)
            network.reset()
            with torch.set_grad_enabled(training):
                found = run(*batches[whole])
            if training:
                loss = found if isinstance(found, torch.Tensor) and found.ndim == 0 else loss_of(found)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seconds[-1].append(time.perf_counter() - begin)
    return {"calls_s": seconds, "cpu_s": cpu_seconds() - before, "loss": loss.item()}


def given_to_jax(name: str, epochs: Epochs, folder: Path) -> None:
    """What ``epoch_jax.py`` reads."""
    torch.manual_seed(0)
    network = SCRIPTS[name].make()
    sizes = {"smaller": smaller(network.inputs, SCRIPTS[name].dims), "whole": network.inputs}
    values = {f"value.{key}": value for part in network.parts for key, value in part.named_parameters()}
    inputs = {f"input.{size}.{k}": x for size, each in sizes.items() for k, x in enumerate(each)}
    np.savez(folder / "given.npz", **{key: x.numpy(force=True) for key, x in (values | inputs).items()})
    (folder / "plan.json").write_text(json.dumps({"epochs": epochs, "rate": RATE}))


def answered(name: str, way: str, kind: str, caches: dict[str, str], jax: str | None) -> Row:
    """What a process prints, or why there is nothing."""
    with tempfile.TemporaryDirectory(prefix="reroll-bench-") as folder:
        command = [sys.executable, __file__, "--row", name, way, kind]
        if way == JAX:
            given_to_jax(name, KINDS[kind], Path(folder))
            command = [str(jax), str(Path(__file__).with_name("epoch_jax.py")), folder, str(SCRIPTS[name].jax)]
        try:
            done = alone(command, LIMIT, caches)
        except subprocess.TimeoutExpired:
            return {"no answer within_s": LIMIT}
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-2000:]}


def measured(name: str, way: str, jax: str | None) -> Row:
    """Calls cold, in the next process, and of 200 steps; what follows a process without an answer is left out."""
    found = Row()
    for kinds in (("cold", "next"), ("200 steps",)):
        with empty_caches() as caches:
            kept = {"JAX_COMPILATION_CACHE_DIR": caches["TMPDIR"], "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            for kind in kinds:
                plan = "200 steps" if kind == "200 steps" else "cold"
                found[kind] = answered(name, way, plan, caches | kept, jax)
                if "calls_s" not in found[kind]:
                    return found
    return found


def figures(rows: dict[str, Row], way: str) -> list[str]:
    """Longest wait and sum of waits of the first epoch, CPU seconds, the next process over eager, 200 steps / eager."""
    cold, after, steps = (rows[way].get(kind, {}) for kind in ("cold", "next", "200 steps"))
    if "calls_s" not in cold:
        return [f"no answer in {LIMIT} s" if "no answer within_s" in cold else "error"]
    first = cold["calls_s"][0]
    cells = [f"{max(first):.2f}", f"{sum(first):.2f}", f"{cold['cpu_s']:.1f}"]
    eager = rows.get("eager", {})
    if "calls_s" in after and "next" in eager:
        cells.append(f"{sum(after['calls_s'][0]) - sum(eager['next']['calls_s'][0]):.2f}")
    if "calls_s" in steps and "200 steps" in eager:
        cells.append(f"{sum(steps['calls_s'][0]) / sum(eager['200 steps']['calls_s'][0]):.2f}")
    return cells


def show(result: dict[str, dict[str, Row]], console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", title="Seconds")
    for what in ("longest wait", "first epoch", "CPU, all", "next process, over eager", "200 steps / eager"):
        table.add_column(what, justify="right")
    for name, rows in result.items():
        for way in (way for way in (*WAYS, JAX) if way in rows):
            table.add_row(name, way, *figures(rows, way))
    console.print(table)


def main() -> None:
    """Measure, save and print."""
    every = [*WAYS, JAX]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=3, metavar=("NETWORK", "WAY", "KIND"), help="calls here, as JSON")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS), help="networks to measure")
    parser.add_argument("--ways", nargs="*", default=every, choices=every, help="rows to measure")
    parser.add_argument("--again", action="store_true", help="rows that are there, too")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has JAX and equinox")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    given = parser.parse_args()
    if given.row:
        name, way, kind = given.row
        print(json.dumps(row(name, way, KINDS[kind])))
        return
    result: dict[str, dict[str, Row]] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, way in () if given.show else ((name, way) for name in given.only for way in given.ways):
        if (way == JAX and not (given.jax and SCRIPTS[name].jax)) or (way in result.get(name, {}) and not given.again):
            continue
        asked = f"python benchmarks/epoch.py --only {name!r} --ways {way!r}" + " --jax PYTHON" * (way == JAX)
        where = machine(asked) | {"threads": 1, "allowed": len(os.sched_getaffinity(0))}
        result.setdefault(name, {})[way] = {"environment": where} | measured(name, way, given.jax)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=130))


if __name__ == "__main__":
    main()
