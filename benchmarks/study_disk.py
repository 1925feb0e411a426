"""Slow and large remote tiers: ``python benchmarks/study_disk.py``.

Parts:

- ``pace``: the recurrent network of ``study.py`` with its carries in a tier of a given bandwidth and latency
  (``paced.py``), each schedule at every pace: the sweep that the paper's experiments ask for (Bencheikh, Finkbeiner,
  Neftci 2024, arXiv 2412.11810).
- ``density``: the same schedules at one pace, with spikes in 0.5 % to 50 % of the places of the carries, anywhere or
  in clusters: how far the lossless codec makes up for a slow tier.
- ``large``: gigabytes of carries on a real disk, in a control group whose memory they do not fit into, so that neither
  writes nor reads end in the system's cache of files. It needs root and control groups of Linux; else it says so.

Wall seconds of a training step on one core, the least of the rounds, as waiting takes no CPU; beside it what
``reroll.explain`` said before, from the tier as ``reroll.calibrate`` measured it. Gradients are compared with plain
BPTT's. Parts are saved in ``results/study_disk.json``; the tables of docs/background/study.md and the plot are made
from the file, with ``--show`` alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from measuring import Step, aside, gradients, pinned, relative_error, told_apart, training_step
from paced import paced, written
from speed_networks import Network, Recurrent
from study_disk_group import limited
from study_disk_tables import LOCAL, PLAIN, draw, write
from torch import Tensor, nn

import reroll

HERE = Path(__file__).resolve().parent
RESULT, PAGE = HERE / "results" / "study_disk.json", HERE.parent / "docs" / "background" / "study.md"
BANDWIDTHS, LATENCIES = (5e6, 20e6, 80e6, 320e6), (0.0, 1e-3, 5e-3, 20e-3)  # bytes a second, seconds
DENSITIES, PACE = (0.005, 0.05, 0.2, 0.5), (10e6, 1e-3)
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "remote": {"schedule": "remote"},
    "hierarchical": {"schedule": "hierarchical"},
    "double": {"schedule": "double"},
    "hrevolve": {"schedule": "hrevolve", "slots": 4},
}
STEPS, BATCH, NEURONS = 256, 64, 512
LARGE_STEPS, LARGE_BATCH, LARGE_NEURONS, LARGE_MEMORY = 16384, 512, 1024, 3 << 30  # carries of 2 MiB
Result = dict[str, Any]


class Recorded(Network):
    """Leaky neurons that add up recorded spikes and pass them on: a carry of a given density, and little else to do."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.sizes = ((neurons,), (neurons,))
        self.weight = nn.Linear(neurons, neurons)

    def step(self, x_BH: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The last spikes times what was computed from the ones before, and a sum."""
        last_BH, sum_BH = state
        current_BH = self.weight(last_BH)
        return x_BH * (1 + 0.1 * torch.tanh(current_BH)), 0.9 * sum_BH + current_BH


class Streaming(Network):
    """Leaky neurons with an input each: a large carry, and so little work that a disk hardly keeps up."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.sizes = ((neurons,),)
        self.gain, self.decay = (nn.Parameter(torch.rand(neurons)) for _ in range(2))

    def step(self, x_B1: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The potentials."""
        return (torch.tanh(self.decay * state[0] + self.gain * x_B1),)


def spikes(density: float, clustered: bool) -> Tensor:
    """(T, B, H) zeros and ones. clustered: whole runs of 64 neurons fire, or are silent."""
    generator = torch.Generator().manual_seed(1)
    runs = NEURONS // 64 if clustered else NEURONS
    fired = torch.rand(STEPS, BATCH, runs, generator=generator) < density
    return fired.repeat_interleave(NEURONS // runs, dim=2).float()


def measured(network: Network, x: Tensor, ways: Mapping[str, Mapping[str, Any]], rounds: int, plain: bool) -> Result:
    """Every way with its options: seconds, predicted seconds, bytes in tiers, errors of gradients.

    plain: beside plain BPTT, with which gradients are compared then; else with those of the first way.
    """
    models = {way: reroll.compile(network, start="compiled", segment=8, **options) for way, options in ways.items()}
    steps: dict[str, Step] = {PLAIN: training_step(network, network, x)} if plain else {}
    steps |= {way: training_step(model, network, x) for way, model in models.items()}
    reports = {way: reroll.explain(model, x) for way, model in models.items()}  # before the first call
    expected = gradients(next(iter(steps.values())), network)
    found: Result = {PLAIN: {}} if plain else {}
    for way, report in reports.items():
        told = {"predicted_s": report.to_json()["predicted_seconds"], "plan": report.loops[0].choice.describe()}
        told |= {"relative_error": relative_error(gradients(steps[way], network), expected)}
        before = written()
        steps[way]()
        found[way] = told | {"predicted_bytes": sum(report.remote_peaks.values()), "written": written() - before}
    seconds = timed(steps, rounds)
    return {way: {**found[way], "least_s": seconds[way]} for way in steps}


@aside()
def timed(steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Least wall seconds of each step, in turns."""
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - begin)
    return {way: min(each) for way, each in seconds.items()}


def pace(rounds: int) -> list[Result]:
    """Every schedule at every pace."""
    torch.manual_seed(0)
    network, x = Recurrent(3.0, NEURONS), torch.randn(STEPS, BATCH, 64)
    tiers = {pace: paced(*pace) for pace in itertools.product(BANDWIDTHS, LATENCIES)}  # all, before they are measured
    rows = []
    for latency in LATENCIES:
        for bandwidth in BANDWIDTHS:
            ways = {way: {**options, "remote": tiers[bandwidth, latency]} for way, options in SCHEDULES.items()}
            found = measured(network, x, {LOCAL: {"schedule": "standard"}, **ways}, rounds, plain=True)
            rows.append({"bandwidth": bandwidth, "latency": latency, "ways": found})
    return rows


def density(rounds: int) -> list[Result]:
    """Every schedule at one pace, with carries of several densities."""
    rows = []
    for clustered in (False, True):
        for each in DENSITIES:
            torch.manual_seed(0)
            network, x = Recorded(NEURONS), spikes(each, clustered)
            ways = {way: {**options, "remote": paced(*PACE)} for way, options in SCHEDULES.items()}
            found = measured(network, x, {LOCAL: {"schedule": "standard"}, **ways}, rounds, plain=True)
            rows.append({"density": each, "clustered": clustered, "ways": found})
    return rows


def large(rounds: int) -> list[Result]:
    """Gigabytes on a disk; here in a process whose memory is limited."""
    torch.manual_seed(0)
    network, x = Streaming(LARGE_NEURONS), torch.randn(LARGE_STEPS, LARGE_BATCH, 1)
    ways = {"remote, every segment": {"schedule": "remote", "chunk": 8}, "double": {"schedule": "double", "chunk": 8}}
    options = {LOCAL: {"schedule": "standard"}} | {way: {**each, "remote": "disk"} for way, each in ways.items()}
    return [{"limit_bytes": LARGE_MEMORY, "ways": measured(network, x, options, rounds, plain=False)}]


PARTS = {"pace": pace, "density": density, "large": large}


def part(name: str, rounds: int, core: int) -> Result:
    """A part, in a process and caches of its own; the large one in a control group."""
    command = [sys.executable, __file__, "--part", name, "--rounds", str(rounds), "--core", str(core)]
    asked = f"python benchmarks/study_disk.py --only {name} --rounds {rounds} --core {core}"
    with limited(LARGE_MEMORY if name == "large" else None) as enter:
        rows, where = told_apart(name, command, asked, enter=enter)
    return {"rows": rows, "environment": where}


def main() -> None:
    """Parse the options, measure, save, write the page and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, help="parts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--part", choices=PARTS, help="measure one part here, and print it as JSON")
    parser.add_argument("--show", action="store_true", help="tables and plot from the file")
    given = parser.parse_args()
    if given.part:
        with pinned(given.core):
            print(json.dumps(PARTS[given.part](given.rounds)))
        return
    result: Result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in [] if given.show else given.only or PARTS:
        result[name] = part(name, given.rounds, given.core)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    write(result, PAGE)
    draw(result, RESULT.with_name("study_pace.png"))


if __name__ == "__main__":
    main()
