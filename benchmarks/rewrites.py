"""Where each rewrite of a step pays: ``python benchmarks/rewrites.py``.

A recurrent spiking network (network D) at several widths, batches and densities of spikes: reroll without options,
and with one rewrite left out at a time, all in turns on one core. A rewrite pays where leaving it out takes longer, or
holds more. Thresholds are such that the given part of the neurons fires, found by bisection. CPU seconds of a training
step, median of the rounds, each right behind another of the same kind: such steps are short, and would pay for caches
that the one before has filled. The allocator's peak; gradients are compared with plain BPTT's. The networks of
``speed.py`` stand below, as they are there.

A row is saved in ``results/rewrites.json`` as soon as it is measured; ``--only`` names rows, ``--show`` prints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Step, cost_of, gradients, interleaved, pinned, relative_error, summary, training_step
from network_d import Spike
from rich.console import Console
from rich.table import Table
from speed import EAGER, measure_rows
from speed_networks import NETWORKS, Network, Recurrent, State
from torch import Tensor

import reroll

ALL = "all rewrites"
OPTIONAL = ("merge-gradients", "batch-products", "event-products", "split-biases", "pack-weights")
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    **{name: {"passes": tuple(each for each in reroll.DEFAULT_PASSES if each != name)} for name in OPTIONAL},
    "replayed products": {"replay": False},
    "packed bits": {"codec": "none"},
}


@dataclass(frozen=True)
class Point:
    """Sizes, and the part of the neurons that fires at a step."""

    neurons: int = 256
    batch: int = 32
    density: float = 0.15
    steps: int = 100


POINTS: Mapping[str, Point] = {
    "256 neurons, batch 32, density 0.15": Point(),
    "1,024 neurons": Point(neurons=1024, steps=50),
    "2,048 neurons": Point(neurons=2048, steps=25),
    "batch 1": Point(batch=1),
    "batch 64": Point(batch=64),
    "batch 128": Point(batch=128),
    "batch 256": Point(batch=256, steps=50),
    "1,024 neurons, batch 128": Point(neurons=1024, batch=128, steps=25),
    "density 0.01": Point(density=0.01),
    "density 0.05": Point(density=0.05),
    "density 0.3": Point(density=0.3),
    "density 0.5": Point(density=0.5),
}


class Firing(Recurrent):
    """Network D with a threshold of its own."""

    def __init__(self, neurons: int) -> None:
        super().__init__(3.0, neurons)
        self.threshold = 1.0

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """Potential, spikes, summed readout."""
        v_BH, z_BH, sum_BO = state
        v_BH = 0.9 * v_BH * (1 - z_BH) + self.wi(x_BI) + self.wr(z_BH)
        z_BH = Spike.apply(v_BH - self.threshold)  # type: ignore[no-untyped-call]
        return v_BH, z_BH, sum_BO + self.wo(z_BH)


@torch.no_grad()
def density_of(network: Firing, x_TBI: Tensor) -> float:
    """The part of the neurons that fires, over all steps."""
    state, fired = network.initial(x_TBI), 0.0
    for x_BI in x_TBI:
        state = network.step(x_BI, *state)
        fired += float(state[1].mean()) / x_TBI.shape[0]
    return fired


def firing(point: Point, x_TBI: Tensor) -> Firing:
    """A network of which the wanted part fires."""
    torch.manual_seed(0)
    network, low, high = Firing(point.neurons), -20.0, 20.0
    for _ in range(16):
        network.threshold = (low + high) / 2
        if density_of(network, x_TBI) > point.density:
            low = network.threshold
        else:
            high = network.threshold
    return network


def subject(point: Point | str) -> tuple[Network, Tensor]:
    """A network with its input: of a size, or the one of ``speed.py`` with a name."""
    torch.manual_seed(0)
    if isinstance(point, str):
        make, inputs, steps = NETWORKS[point]
        return make(), inputs(steps)
    x = torch.randn(point.steps, point.batch, 64, generator=torch.Generator().manual_seed(1))
    return firing(point, x), x


def row(point: Point | str, rounds: int, core: int | None, **options: Any) -> dict[str, Any]:
    """One network with all rewrites and with each left out; ``options`` are those of ``reroll.compile``."""
    with pinned(core):
        network, x = subject(point)
        training, found = {EAGER: training_step(network, network, x)}, {}
        expected = gradients(training[EAGER], network)
        for way, given in {ALL: {}, **LEFT_OUT}.items():
            fast = reroll.compile(network, start="compiled", **options, **given)
            step = training[way] = training_step(fast, network, x)
            error = relative_error(gradients(step, network), expected)
            network.zero_grad(set_to_none=True)
            found[way] = {"relative_error": error, "local_peak_bytes": cost_of(step, [network]).local_peak}
        times = summary(interleaved({way: _second(step) for way, step in training.items()}, rounds), EAGER)
    density = density_of(network, x) if isinstance(network, Firing) else None
    return {"density": density, "ways": {each: {**found[each], **times[each]} for each in found}}


def _second(step: Step) -> Step:
    """The step once, and again with a clock."""

    def run() -> float:
        step()
        begin = time.process_time()
        step()
        return time.process_time() - begin

    return run


def show(result: dict[str, Any]) -> None:
    """A table of time and memory without each rewrite, relative to those with all."""
    table = Table("", "density", "x eager; MB", *LEFT_OUT, title="without: times of the time, of the memory, of all")
    for name, each in result.items():
        ways = each["ways"]
        whole = ways[ALL]
        told = [f"{whole['median_ratio']:.3f}; {whole['local_peak_bytes'] / 1e6:.2f}"]
        for way in LEFT_OUT:
            time = ways[way]["median_s"] / whole["median_s"]
            told.append(f"{time:.2f}; {ways[way]['local_peak_bytes'] / whole['local_peak_bytes']:.2f}")
        table.add_row(name, "" if each["density"] is None else f"{each['density']:.3f}", *told)
    Console(width=180).print(table)


if __name__ == "__main__":
    names = [*POINTS, *NETWORKS]
    measure_rows(__file__, __doc__, names, lambda name, *how: row(POINTS.get(name, name), *how), show, core=0)
