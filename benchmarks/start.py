"""What other sizes of a batch cost: ``python benchmarks/start.py``.

For ten networks, at 100 steps, in a process of one thread on one core with empty caches: the CPU seconds of the first
training step at each of several batch sizes, the C++ compiler's included, and of a second one at the last size;
``next``: of a first step in the next process, with what the first one left in the caches. ``dynamic=True`` is torch's
own way to compile for all sizes at once. With ``--jax`` a process of JAX for each size: wall seconds, one thread.
Beside it, what code that takes sizes as operands costs in time: the network at its usual length and the second batch
size, by that code and by code for this size alone, in turns. And what new lengths cost: the first step at each of ten,
a second one there, and in the first one the runs that are recorded, with eager's forward. First steps are proved,
as by default; in second ones the model is not looked at again. The result goes to ``results/start.json``; a row that is
there is left alone without ``--again``. (Rows of before have ``check_s``, the run that checked a new length.)
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import (
    alone,
    cpu_seconds,
    empty_caches,
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
from speed_networks import MORE, NETWORKS
from speed_peers import Peers
from torch import Tensor

import reroll
from reroll.backends.construct.stages.takeover import aside
from reroll.backends.front.recorded import Recorded
from reroll.backends.inductor.sizes.family import forget

RESULT = Path(__file__).resolve().parent / "results" / "start.json"
STEPS, ROUNDS = 100, 20
SCAN = "JAX lax.scan"
TEN = NETWORKS | {name: MORE[name] for name in ("nn.LSTM", "nn.GRU")}
LIMIT = 900  # seconds for one row
PARTS = (1, 0.75, 0.5, 0.875, 0.625)  # of a network's batch: its size, and four more
Way = Callable[..., Any]
KINDLESS = ("nn.LSTM", "nn.GRU")  # those of which speed_jax.py has no step
WAYS: dict[str, Way] = {
    "eager": lambda network: network,
    "reroll.compile": partial(reroll.compile, start="compiled"),
    "reroll.compile, dynamic=True": partial(reroll.compile, start="compiled", dynamic=True),
    "backend": partial(torch.compile, backend="reroll", options={"start": "compiled"}),
    "torch.compile": torch.compile,
    "torch.compile, dynamic=True": partial(torch.compile, dynamic=True),
}

NEXT = ("eager", "reroll.compile", "backend")  # ways whose next process is measured, too
EVERY = (*WAYS, SCAN, "shared", "new lengths")
NEW = 10  # lengths


def sized(x: Tensor, part: float) -> Tensor:
    """An input with a part of its batch, its second dimension."""
    return x[:, : max(round(x.shape[1] * part), 1)].contiguous()


def row(name: str, way: str, steps: int, core: int | None) -> dict[str, Any]:
    """First steps at all sizes, here, in a process that has done nothing else."""
    make, inputs, _ = TEN[name]
    torch.manual_seed(0)
    network, x = make(), inputs(steps)
    compiled, first, errors = WAYS[way](network), [], []
    with pinned(core):
        for at, part in enumerate((*PARTS, PARTS[-1])):
            given = sized(x, part)
            begin = cpu_seconds()
            with nullcontext() if at < len(PARTS) else aside():
                training_step(compiled, network, given)()
            first.append(cpu_seconds() - begin)
            found = [each.grad.clone() for each in network.parameters() if each.grad is not None]
            errors.append(relative_error(found, gradients(training_step(network, network, given), network)))
    sizes = [sized(x, part).shape[1] for part in PARTS]
    return {"sizes": sizes, "first_s": first[:-1], "again_s": first[-1], "error": max(errors)}


def of_jax(name: str, steps: int, core: int | None, python: str) -> dict[str, Any]:
    """First steps of JAX's scan at all sizes, each in a process that has done nothing else."""
    make, inputs, _ = TEN[name]
    torch.manual_seed(0)
    network, x, first, errors = make(), inputs(steps), [], []
    with pinned(core):
        for part in PARTS:
            given = sized(x, part)
            expected = gradients(training_step(network, network, given), network)
            with Peers(python, network, given, expected, ways=[SCAN]) as peers:
                told = peers.told[SCAN]
            first.append(told["first_step_wall_s"])
            errors.append(told["relative_error"])
    return {"sizes": [sized(x, part).shape[1] for part in PARTS], "first_s": first, "error": max(errors)}


def shared(name: str, rounds: int, core: int | None) -> dict[str, Any]:
    """The time of a step by code that takes sizes as operands, and by code for these sizes alone."""
    make, inputs, steps = TEN[name]
    torch.manual_seed(0)
    network, x = make(), inputs(steps)
    given = sized(x, PARTS[1])
    ways = {}
    with pinned(core):
        for kind, before in (("any size", [x]), ("this size", [])):
            forget()
            compiled = reroll.compile(network, start="compiled")
            ways[kind] = training_step(compiled, network, given)
            for each in (*before, given):
                training_step(compiled, network, each)()
        return summary(interleaved(ways, rounds), "this size")


def of_lengths(name: str, core: int | None) -> dict[str, Any]:
    """First and second steps at new lengths, the runs that are recorded, and eager's forward, in CPU seconds."""
    make, inputs, steps = TEN[name]
    torch.manual_seed(0)
    network, x, record = make(), inputs(steps), Recorded.record
    compiled, errors = reroll.compile(network, start="compiled"), []
    told: dict[str, list[float]] = {"first_s": [], "again_s": [], "record_s": [], "eager_forward_s": []}
    records = list[float]()

    def timed(into: list[float], function: Way, *arguments: Any, clock: Callable[[], float] = time.process_time) -> Any:
        begin = clock()
        found = function(*arguments)
        into.append(clock() - begin)
        return found

    def recorded(self: Recorded, *arguments: Any) -> Any:
        return timed(records, record, self, *arguments)

    lengths = random.Random(0).sample(range(steps // 2, steps), NEW)
    with pinned(core):
        training_step(compiled, network, x)()
        for given in (x[:length] for length in lengths):
            step = training_step(compiled, network, given)
            with patch.object(Recorded, "record", recorded):
                timed(told["first_s"], step, clock=cpu_seconds)  # the C++ compiler's included
            told["record_s"].append(sum(records))
            records.clear()
            with aside():
                timed(told["again_s"], step)
            found = [each.grad.clone() for each in network.parameters() if each.grad is not None]
            errors.append(relative_error(found, gradients(training_step(network, network, given), network)))
            timed(told["eager_forward_s"], network, given)
    return {"lengths": lengths, **told, "error": max(errors)}


def measured(*arguments: str, core: int, again: bool = False) -> dict[str, Any]:
    """What this file prints in a process of its own; ``again``: and in the next one the first step."""
    command, lines = [sys.executable, __file__, "--core", str(core), *arguments], list[str]()
    try:
        with empty_caches() as caches:
            for _ in range(1 + again):
                done = alone(command, LIMIT, caches)
                if done.returncode:
                    raise RuntimeError(done.stderr[-2000:])
                lines.append(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"no answer within_s": LIMIT}
    found: dict[str, Any] = json.loads(lines[0])
    return found | ({"next_s": json.loads(lines[1])["first_s"][0]} if again else {})


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each network and way."""
    numbers = [f"size {n}" for n in range(1, len(PARTS) + 1)]
    table = Table("network", "way", *numbers, "again", "next process", title="CPU seconds")
    for name, ways in result["networks"].items():
        for way in (way for way in (*WAYS, SCAN) if "first_s" in ways.get(way, {})):
            found = (*ways[way]["first_s"], ways[way].get("again_s"), ways[way].get("next_s"))
            table.add_row(name, way, *("-" if each is None else f"{each:.2f}" for each in found))
        if "any size" in ways.get("shared", {}):
            table.add_row(name, f"any size / this size: {ways['shared']['any size']['median_ratio']:.2f}")
        if "record_s" in (found := ways.get("new lengths", {})):
            ratio = sum(found["record_s"]) / sum(found["eager_forward_s"])
            table.add_row(name, f"records / eager's forward: {ratio:.2f}")
    console.print(table)


def fill(made: dict[str, Any], name: str, ways: Sequence[str], core: int, jax: str | None) -> Iterator[None]:
    """Measure what is not there of a network's rows."""
    there = [way for way in ways if way != SCAN or (jax is not None and name not in KINDLESS)]
    for way in (way for way in there if way not in made):
        more = ("--jax", str(jax)) if way == SCAN else ()
        made[way] = measured("--row", name, way, *more, core=core, again=way in NEXT)
        yield


def one(name: str, way: str, core: int | None, jax: str | None) -> dict[str, Any]:
    """One row, here."""
    if way == SCAN:
        assert jax is not None
        return of_jax(name, STEPS, core, jax)
    if way == "new lengths":
        return of_lengths(name, core)
    return shared(name, ROUNDS, core) if way == "shared" else row(name, way, STEPS, core)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="one row here, as JSON")
    parser.add_argument("--only", nargs="*", default=list(TEN), choices=list(TEN), help="networks to measure")
    parser.add_argument("--ways", nargs="*", default=list(EVERY), choices=list(EVERY), help="rows to measure")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has JAX and equinox")
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        print(json.dumps(one(name, way, given.core, given.jax)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"steps": STEPS, "networks": {}}
    for name in given.only:
        before = result["networks"].get(name, {})
        jax = " --jax PYTHON" if given.jax else ""
        where = machine(f"python benchmarks/start.py --only {name!r} --core {given.core}{jax}") | {"threads": 1}
        made = {"environment": where} if given.again else before or {"environment": where}
        for _ in fill(made, name, given.ways, given.core, given.jax):
            result["networks"][name] = made
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=130))


if __name__ == "__main__":
    main()
