"""How long a segment should be: ``python benchmarks/segment_lengths.py``.

The networks of ``speed.py`` with the schedule ``standard`` and segments of several lengths, beside plain BPTT: CPU
seconds of a training step in turns on one core, median of the rounds, the allocator's peak, and the CPU seconds of the
first step, with compilers. Every length is compiled in the same process and cache, shortest first; what one
shares with another, such as the event kernels, is paid by the first. *itself*: the length that reroll would choose,
which is compiled before, so its first step says nothing.

A row is saved in ``results/segment_lengths.json`` as soon as it is measured; ``--only`` names networks, ``--show``
prints.
"""

from __future__ import annotations

from typing import Any

import torch
from measuring import cost_of, cpu_seconds, gradients, interleaved, pinned, relative_error, summary, training_step
from rich.console import Console
from rich.table import Table
from speed import EAGER, measure_rows
from speed_networks import NETWORKS

import reroll

LENGTHS = (2, 4, 5, 6, 8, 10, 12, 16)


def row(name: str, rounds: int, core: int | None, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """One network at all lengths of a segment."""
    torch.manual_seed(0)
    make, inputs, steps = NETWORKS[name]
    network, x = make(), inputs(steps)
    plain = training_step(network, network, x)
    training, found = {EAGER: plain}, {}
    with pinned(core):
        expected = gradients(plain, network)
        chosen = reroll.explain(reroll.compile(network, start="compiled"), x).loops[0].choice.segment
        for length in lengths:
            fast = reroll.compile(network, start="compiled", schedule="standard", segment=length)
            step = training[str(length)] = training_step(fast, network, x)
            before = cpu_seconds()
            error = relative_error(gradients(step, network), expected)
            first = cpu_seconds() - before
            network.zero_grad(set_to_none=True)
            peak = cost_of(step, [network]).local_peak
            found[str(length)] = {"relative_error": error, "first_step_s": first, "local_peak_bytes": peak}
        times = summary(interleaved(training, rounds), EAGER)
    return {"steps": steps, "itself": chosen, "lengths": {each: {**found[each], **times[each]} for each in found}}


def show(result: dict[str, Any]) -> None:
    """A table of time, first step and memory."""
    table = Table("network", "steps", "itself", *map(str, LENGTHS), title="x eager; CPU s of the first step; peak MB")
    for name, each in result.items():
        cells = (each["lengths"][str(length)] for length in LENGTHS)
        told = (f"{c['median_ratio']:.3f}; {c['first_step_s']:.0f}; {c['local_peak_bytes'] / 1e6:.1f}" for c in cells)
        table.add_row(name, f"{each['steps']:,}", str(each["itself"]), *told)
    Console(width=180).print(table)


if __name__ == "__main__":
    measure_rows(__file__, __doc__, list(NETWORKS), row, show, core=1)
