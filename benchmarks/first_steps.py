"""How long the first training step takes, cold and warm: ``python benchmarks/first_steps.py``.

Cold: in a fresh process with an empty inductor cache. Warm: in another process, with the cache that the cold one left.
For some networks of ``speed.py`` at a length of 64, the CPU seconds of a first and a second step in a process of one
thread on one core, its children's (the C++ compiler) included: ``reroll.compile``, the backend, both lowerings, and
``torch.compile`` as it is. The result goes to ``results/first_steps.json``.
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
from speed_networks import NETWORKS

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "first_steps.json"
NAMES = ("recurrent LIF (D2r)", "convolutional spiking", "LSTM cell", "GRU cell")
STEPS = 64
LIMIT = 1200  # seconds for one first step
Way = Callable[[Any], Any]
WAYS: dict[str, Way] = {
    "reroll.compile": partial(reroll.compile, time_dim=0),
    "reroll.compile, eager": partial(reroll.compile, time_dim=0, lowering="eager"),
    "backend": partial(torch.compile, backend="reroll"),
    "backend, eager": partial(torch.compile, backend="reroll", options={"lowering": "eager"}),
    "torch.compile": torch.compile,
}


def row(name: str, way: str, core: int) -> dict[str, float]:
    """CPU seconds of the first steps here, in a process that has done nothing else."""
    make, inputs, _ = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make(), inputs(STEPS)
    seconds = [cpu_seconds()]
    with pinned(core):
        step = training_step(WAYS[way](network), network, x)
        for _ in range(2):
            step()
            seconds.append(cpu_seconds())
    return {"first_s": seconds[1] - seconds[0], "second_s": seconds[2] - seconds[1]}


def measured(name: str, way: str, core: int) -> dict[str, Any]:
    """Cold, then warm, each in a process of its own."""
    command = [sys.executable, __file__, "--row", name, way, "--core", str(core)]
    found = {}
    with tempfile.TemporaryDirectory(prefix="reroll-bench-") as cache:
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        alone |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for kind in ("cold", "warm"):
            try:
                done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True, timeout=LIMIT)
            except subprocess.TimeoutExpired:
                return {kind: {"no answer within_s": LIMIT}}
            found[kind] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", "first step, cold", "warm", "second step", title=f"CPU seconds, T={STEPS}")
    for name, ways in result["networks"].items():
        for way, found in ((way, ways[way]) for way in WAYS if way in ways):
            cold, warm = (found.get(kind, {}).get("first_s") for kind in ("cold", "warm"))
            second = found.get("warm", {}).get("second_s")
            table.add_row(name, way, *("-" if each is None else f"{each:.2f}" for each in (cold, warm, second)))
    console.print(table)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="one first step here, as JSON")
    parser.add_argument("--only", nargs="*", default=list(NAMES), choices=list(NETWORKS), help="networks to measure")
    parser.add_argument("--core", type=int, default=1)
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        print(json.dumps(row(name, way, given.core)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"steps": STEPS, "networks": {}}
    for name in given.only:
        where = machine(f"python benchmarks/first_steps.py --only {name!r} --core {given.core}") | {"threads": 1}
        result["networks"][name] = {"environment": where}
        for way in WAYS:
            result["networks"][name][way] = measured(name, way, given.core)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=110))


if __name__ == "__main__":
    main()
