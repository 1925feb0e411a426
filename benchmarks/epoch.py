"""What the first epochs of a training script wait for: ``python benchmarks/epoch.py``.

Three epochs of training batches, a smaller last one, evaluation, and its smaller last batch, in a new process of one
thread: *cold*, with empty caches of inductor and of reroll, then in the *next* process with what that left. And cold,
in a process of its own, 200 training steps at one size of the batch.

- wait: of each call the seconds by the clock (``wall``). On a machine that others use, too, the clock runs on while the
  process gets no core: ``cpu`` takes the CPU seconds of the process and of its children where these are less. (They are
  more where what ran beside the process has ended: a child counts in the call in which it is found to have ended)
- CPU, all: seconds of three epochs, of the process and of all that it began (the C++ compiler, what compiles ahead)

Processes run one after another. What reroll compiles ahead runs beside its process on whatever cores this one may use:
give it two, as a user's has. The other ways use one core at a time; their rows say on how many they ran (``allowed``),
which is one where the command was begun by ``taskset -c 1``, and the load of the machine.

    python benchmarks/epoch.py --jax build/jax/bin/python     # all rows; goes on where it was stopped
    python benchmarks/epoch.py --ways reroll --again          # one way anew
    python benchmarks/epoch.py --parts epochs                 # without the 200 steps
    python benchmarks/epoch.py --show wall

JAX keeps what it compiled for the next process, too (``JAX_COMPILATION_CACHE_DIR``), which it does not do by default.
A process that gives no answer within twenty minutes is ended, and the row says so. The networks are those of
``epoch_networks.py``; the result goes to ``results/epoch.json``.
"""

from __future__ import annotations

import argparse
import itertools
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
from measuring import alone, empty_caches, machine
from rich.console import Console
from rich.table import Table

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "epoch.json"
LIMIT = 1200  # seconds for one process
RATE = 1e-5
Epochs = list[list[tuple[bool, bool]]]
"""Calls by epoch: whether the batch is a whole one, and whether it trains."""
Wait = tuple[float, float]
"""Seconds by the clock, and of CPU."""
Way = Callable[[Network], Callable[..., Any]]
Row = dict[str, Any]


def clocks() -> Wait:
    """Now, by the clock and in CPU seconds."""
    return time.perf_counter(), time.process_time() + sum(os.times()[2:4])


def since(begin: Wait) -> Wait:
    """Seconds of both, to a hundredth of a millisecond."""
    wall, cpu = (round(now - then, 5) for now, then in zip(clocks(), begin, strict=True))
    return wall, cpu


def ours(network: Network, **options: Any) -> Any:
    """By reroll."""
    return reroll.compile(network.run, **options)


JAX = "JAX lax.scan"
WAYS: dict[str, Way] = {
    "eager": lambda network: network.run,
    "reroll": ours,
    "reroll, proof=never": partial(ours, proof="never"),
    "reroll, start=compiled": partial(ours, start="compiled"),
    "torch.compile": lambda network: torch.compile(network.run),
    "torch.compile, dynamic=True": lambda network: torch.compile(network.run, dynamic=True),
}
PARTS = {"epochs": ("cold", "next"), "steps": ("200 steps",)}
"""Processes that follow one another in the same caches."""
KINDS: dict[str, Epochs] = {
    "cold": [[(True, True)] * 12 + [(False, True)] + [(True, False)] * 3 + [(False, False)]] * 3,
    "200 steps": [[(True, True)] * 200],
}


def row(name: str, way: str, epochs: Epochs) -> Row:
    """Seconds of each call, by epoch, CPU seconds of all, and the last loss, in a process that did nothing else."""
    torch.manual_seed(0)
    network = SCRIPTS[name].make()
    batches = (smaller(network.inputs, SCRIPTS[name].dims), network.inputs)
    parameters = [each for part in network.parts for each in torch.nn.Module.parameters(part)]
    optimizer, seconds, loss = torch.optim.SGD(parameters, lr=RATE), list[list[Wait]](), torch.zeros(())
    before, run = clocks(), WAYS[way](network)
    for epoch in epochs:
        seconds.append([])
        for whole, training in epoch:
            begin = clocks()
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
            seconds[-1].append(since(begin))
    return {"calls_s": seconds, "cpu_s": since(before)[1], "loss": loss.item()}


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


def measured(name: str, way: str, part: str, jax: str | None) -> Row:
    """The calls of a part; what follows a process without an answer is left out."""
    found = Row()
    with empty_caches() as caches:
        kept = {"JAX_COMPILATION_CACHE_DIR": caches["TMPDIR"], "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for kind in PARTS[part]:
            plan, before = "cold" if part == "epochs" else kind, os.getloadavg()
            found[kind] = answered(name, way, plan, caches | kept, jax)
            found[kind]["load_average"] = [before[0], os.getloadavg()[0]]
            if "calls_s" not in found[kind]:
                return found
    return found


def figures(rows: dict[str, Row], way: str, clock: str) -> list[str]:
    """Longest wait and sum of waits of the first epoch, CPU seconds, the next process over eager, 200 steps / eager."""
    cold = rows[way].get("cold", {})

    def waits(which: str, kind: str) -> list[float]:
        epochs = rows.get(which, {}).get(kind, {}).get("calls_s", [[]])
        return [wall if clock == "wall" else min(wall, cpu) for wall, cpu in epochs[0]]

    cells = ["-"] * 5
    if first := waits(way, "cold"):
        cells[:3] = f"{max(first):.2f}", f"{sum(first):.2f}", f"{cold['cpu_s']:.1f}"
    else:
        limit = cold.get("no answer within_s")
        cells[0] = f"none in {limit} s" if limit else "error" if "error" in cold else "-"
    if (after := waits(way, "next")) and (eager := waits("eager", "next")):
        cells[3] = f"{sum(after) - sum(eager):.2f}"
    if (steps := waits(way, "200 steps")) and (eager := waits("eager", "200 steps")):
        cells[4] = f"{sum(steps) / sum(eager):.2f}"
    return cells


def show(result: dict[str, dict[str, Row]], clock: str, console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", title=f"Seconds; waits: {clock}")
    for what in ("longest wait", "first epoch", "CPU, all", "next process, over eager", "200 steps / eager"):
        table.add_column(what, justify="right")
    for name, rows in result.items():
        for way in (way for way in (*WAYS, JAX) if way in rows):
            table.add_row(name, way, *figures(rows, way, clock))
    console.print(table)


def saved() -> dict[str, dict[str, Row]]:
    """Rows by network and way."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def fill(name: str, way: str, part: str, jax: str | None) -> None:
    """Measure a part of a row, and save it with where and when."""
    asked = f"python benchmarks/epoch.py --only {name!r} --ways {way!r} --parts {part}" + " --jax PYTHON" * (way == JAX)
    where = machine(asked) | {"threads": 1, "allowed": len(os.sched_getaffinity(0))}
    found = measured(name, way, part, jax)
    result = saved()  # now, as another command may have measured other rows
    made = result.setdefault(name, {}).setdefault(way, {})
    made |= {kind: told | {"environment": where} for kind, told in found.items()}
    RESULT.write_text(json.dumps(result) + "\n")


def main() -> None:
    """Measure, save and print."""
    every = [*WAYS, JAX]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=3, metavar=("NETWORK", "WAY", "KIND"), help="calls here, as JSON")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS), help="networks to measure")
    parser.add_argument("--ways", nargs="*", default=every, choices=every, help="rows to measure")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS), help="parts of a row")
    parser.add_argument("--again", action="store_true", help="rows that are there, too")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has JAX and equinox")
    parser.add_argument("--show", choices=("wall", "cpu"), help="print what is saved")
    given = parser.parse_args()
    if given.row:
        name, way, kind = given.row
        print(json.dumps(row(name, way, KINDS[kind])))
        return
    asked = () if given.show else itertools.product(given.parts, given.only, given.ways)
    for part, name, way in asked:
        there = PARTS[part][0] in saved().get(name, {}).get(way, {}) and not given.again
        if there or (way == JAX and not (given.jax and SCRIPTS[name].jax)):
            continue
        fill(name, way, part, given.jax)
    show(saved(), given.show or "wall", Console(width=130))


if __name__ == "__main__":
    main()
