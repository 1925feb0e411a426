"""What other sizes of a batch cost: ``python benchmarks/start.py``.

For the networks of ``speed.py``, at 100 steps, in a process of one thread on one core with empty caches: the
CPU seconds of the first training step at each of several batch sizes, the C++ compiler's included, and of a second one
at the last size. ``dynamic=True`` is torch's own way to compile for all sizes at once. Beside it, what code that takes
sizes as operands costs in time: the network at its usual length and the second batch size, by that code and by code for
this size alone, in turns. The result goes to ``results/start.json``; a row that is there is left alone without
``--again``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import (
    alone,
    cpu_seconds,
    gradients,
    interleaved,
    machine,
    pinned,
    relative_error,
    summary,
    training_step,
)
from rich.console import Console
from rich.table import Table
from speed_networks import NETWORKS
from torch import Tensor

import reroll
from reroll.backends.inductor.sizes.family import forget

RESULT = Path(__file__).resolve().parent / "results" / "start.json"
STEPS, ROUNDS = 100, 20
LIMIT = 1800  # seconds for one row
PARTS = (1, 0.75, 0.5, 0.875, 0.625)  # of a network's batch: its size, and four more
Way = Callable[[Any], Any]
WAYS: dict[str, Way] = {
    "reroll.compile": partial(reroll.compile, time_dim=0),
    "backend": partial(torch.compile, backend="reroll"),
    "torch.compile": torch.compile,
    "torch.compile, dynamic=True": partial(torch.compile, dynamic=True),
}


def sized(x: Tensor, part: float) -> Tensor:
    """An input with a part of its batch, its second dimension."""
    return x[:, : max(round(x.shape[1] * part), 1)].contiguous()


def row(name: str, way: str, steps: int, core: int | None) -> dict[str, Any]:
    """First steps at all sizes, here, in a process that has done nothing else."""
    make, inputs, _ = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make(), inputs(steps)
    compiled, first, errors = WAYS[way](network), [], []
    with pinned(core):
        for part in (*PARTS, PARTS[-1]):
            given = sized(x, part)
            begin = cpu_seconds()
            training_step(compiled, network, given)()
            first.append(cpu_seconds() - begin)
            found = [each.grad.clone() for each in network.parameters() if each.grad is not None]
            errors.append(relative_error(found, gradients(training_step(network, network, given), network)))
    sizes = [sized(x, part).shape[1] for part in PARTS]
    return {"sizes": sizes, "first_s": first[:-1], "again_s": first[-1], "error": max(errors)}


def shared(name: str, rounds: int, core: int | None) -> dict[str, Any]:
    """The time of a step by code that takes sizes as operands, and by code for these sizes alone."""
    make, inputs, steps = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make(), inputs(steps)
    given = sized(x, PARTS[1])
    ways = {}
    with pinned(core):
        for kind, before in (("any size", [x]), ("this size", [])):
            forget()
            compiled = reroll.compile(network, time_dim=0)
            ways[kind] = training_step(compiled, network, given)
            for each in (*before, given):
                training_step(compiled, network, each)()
        return summary(interleaved(ways, rounds), "this size")


def measured(*arguments: str, core: int) -> dict[str, Any]:
    """What this file prints in a process of its own."""
    command = [sys.executable, __file__, "--core", str(core), *arguments]
    try:
        done = alone(command, LIMIT)
    except subprocess.TimeoutExpired:
        return {"no answer within_s": LIMIT}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", *(f"size {n}" for n in range(1, len(PARTS) + 1)), "again", title="CPU seconds")
    for name, ways in result["networks"].items():
        for way in (way for way in WAYS if "first_s" in ways.get(way, {})):
            cells = (f"{each:.2f}" for each in (*ways[way]["first_s"], ways[way]["again_s"]))
            table.add_row(name, way, *cells)
        if "any size" in ways.get("shared", {}):
            table.add_row(name, f"any size / this size: {ways['shared']['any size']['median_ratio']:.2f}")
    console.print(table)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="one row here, as JSON")
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS), help="networks to measure")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--core", type=int, default=1)
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        found = shared(name, ROUNDS, given.core) if way == "shared" else row(name, way, STEPS, given.core)
        print(json.dumps(found))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"steps": STEPS, "networks": {}}
    for name in given.only:
        before = result["networks"].get(name, {})
        where = machine(f"python benchmarks/start.py --only {name!r} --core {given.core}") | {"threads": 1}
        made = {"environment": where} if given.again else before or {"environment": where}
        for way in (*WAYS, "shared"):
            if way not in made:
                made[way] = measured("--row", name, way, core=given.core)
                result["networks"][name] = made
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=130))


if __name__ == "__main__":
    main()
