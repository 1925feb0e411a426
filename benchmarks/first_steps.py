"""How long the first training step takes, cold and warm: ``python benchmarks/first_steps.py``.

Cold: in a fresh process with empty caches of inductor and of reroll. Warm: in another process, with what the cold one
left.
The CPU seconds of first and second steps in a process of one thread on one core, its children's (the C++ compiler)
included:

- some networks of ``speed.py`` at a length of 64, through both doors, by both lowerings, and by ``torch.compile``
- ``--usual``: ten networks at their usual length, beside eager, and in the warm process the first steps at ten more
  lengths, one after another; and a function of one line under ``torch.compile``, which shows what torch's own compiler
  takes to be loaded

The result goes to ``results/first_steps.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import alone, cpu_seconds, empty_caches, machine, pinned, training_step
from rich.console import Console
from rich.table import Table
from speed_networks import MORE, NETWORKS, Network

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "first_steps.json"
NAMES = ("recurrent LIF (D2r)", "convolutional spiking", "LSTM cell", "GRU cell")
STEPS, MORE_LENGTHS = 64, 10
LIMIT = 1200  # seconds for one process
Way = Callable[[Any], Any]
WAYS: dict[str, Way] = {
    "reroll.compile": partial(reroll.compile, start="compiled"),
    "reroll.compile, eager": partial(reroll.compile, start="compiled", lowering="eager"),
    "backend": partial(torch.compile, backend="reroll", options={"start": "compiled"}),
    "backend, eager": partial(torch.compile, backend="reroll", options={"lowering": "eager"}),
    "torch.compile": torch.compile,
}
ONE_LINE = "a function of one line"


class OneLine(Network):
    """As little as can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x_TBI: torch.Tensor) -> torch.Tensor:
        """One product."""
        return x_TBI * self.weight


USUAL: dict[str, tuple[Callable[[], Network], Callable[[int], torch.Tensor], int]] = {
    ONE_LINE: (OneLine, lambda steps: torch.randn(steps, 8), 8),
    **NETWORKS,
    **{name: MORE[name] for name in ("nn.LSTM", "nn.GRU")},
}
USUAL_WAYS: dict[str, Way] = {
    "eager": lambda network: network,
    "reroll.compile": WAYS["reroll.compile"],
    "reroll.compile, double": partial(reroll.compile, start="compiled", schedule="double"),
}


def row(name: str, way: str, core: int, lengths: Sequence[int]) -> list[float]:
    """CPU seconds of steps of some lengths here, in a process that has done nothing else; 0: the usual length."""
    make, inputs, usual = USUAL[name]
    torch.manual_seed(0)
    network, seconds = make(), list[float]()
    compiled = (WAYS | USUAL_WAYS)[way](network)
    with pinned(core):
        for length in lengths:
            step = training_step(compiled, network, inputs(length or usual))
            begin = cpu_seconds()
            step()
            seconds.append(cpu_seconds() - begin)
    return seconds


def measured(name: str, way: str, core: int, cold: Sequence[int], warm: Sequence[int]) -> dict[str, list[float]]:
    """Cold, then warm, each in a process of its own, with the lengths of its steps; empty without an answer."""
    found = dict[str, list[float]]()
    with empty_caches() as caches:
        for kind, lengths in (("cold", cold), ("warm", warm)):
            command = [sys.executable, __file__, "--row", name, way, "--core", str(core), "--lengths"]
            command += map(str, lengths)
            try:
                done = alone(command, LIMIT, caches)
            except subprocess.TimeoutExpired:
                return {}
            found[kind] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_and_second(name: str, way: str, core: int) -> dict[str, Any]:
    """The first two steps at the short length."""
    found = measured(name, way, core, (STEPS, STEPS), (STEPS, STEPS))
    if not found:
        return {"cold": {"no answer within_s": LIMIT}}
    return {kind: {"first_s": first, "second_s": second} for kind, (first, second) in found.items()}


def usual(name: str, way: str, core: int) -> dict[str, Any]:
    """The first step at the usual length, and in the next process those at more lengths."""
    length = USUAL[name][2]
    lengths = [length + 1 + 3 * number for number in range(MORE_LENGTHS)] if name != ONE_LINE and way != "eager" else []
    found = measured(name, way, core, (0,), (0, *lengths))
    if not found:
        return {"no answer within_s": LIMIT}
    return {"first_s": found["cold"][0], "next_s": found["warm"][0], "lengths_s": found["warm"][1:]}


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each network and way."""
    table = Table("network", "way", "first step, cold", "warm", "second step", title=f"CPU seconds, T={STEPS}")
    for name, ways in result["networks"].items():
        for way, found in ((way, ways[way]) for way in WAYS if way in ways):
            cold, warm = (found.get(kind, {}).get("first_s") for kind in ("cold", "warm"))
            second = found.get("warm", {}).get("second_s")
            table.add_row(name, way, *("-" if each is None else f"{each:.2f}" for each in (cold, warm, second)))
    console.print(table)
    table = Table("network", "way", "first step, cold", "warm", "at a new length", title="CPU seconds, usual length")
    for name, ways in result.get("usual", {}).items():
        for way, found in ways["rows"].items():
            cells = [found["first_s"], found["next_s"]]
            cells += [sum(found["lengths_s"]) / MORE_LENGTHS] if found["lengths_s"] else []
            table.add_row(name, way, *(f"{each:.2f}" for each in cells))
    console.print(table)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="steps here, as JSON")
    parser.add_argument("--lengths", nargs="*", type=int, default=[], help="of the steps of a row")
    parser.add_argument("--usual", action="store_true", help="ten networks at their usual length")
    parser.add_argument("--only", nargs="*", default=[], choices=list(USUAL), help="networks to measure")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    parser.add_argument("--core", type=int, default=1)
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        print(json.dumps(row(name, way, given.core, given.lengths)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"steps": STEPS, "networks": {}}
    for name in () if given.show else given.only or (USUAL if given.usual else NAMES):
        kind = " --usual" if given.usual else ""
        where = machine(f"python benchmarks/first_steps.py{kind} --only {name!r} --core {given.core}") | {"threads": 1}
        if given.usual:
            ways = ("torch.compile",) if name == ONE_LINE else USUAL_WAYS
            rows = {way: usual(name, way, given.core) for way in ways}
            result.setdefault("usual", {})[name] = {"environment": where, "rows": rows}
        else:
            rows = {way: first_and_second(name, way, given.core) for way in WAYS}
            result["networks"][name] = {"environment": where, **rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=110))


if __name__ == "__main__":
    main()
