"""What it gives to do linear steps together: ``python benchmarks/linear.py``.

A layer of retention (linear attention with a decay for each head that depends on the input) as a plain loop, of four
heads with matrices of several sizes, at several batches, whether reroll would do their steps together or not. Eager,
``torch.utils.checkpoint``, reroll, and reroll without its pass ``linear-steps``, in turns on one core. CPU seconds of a
training step, medians of the rounds; the allocator's peak; CPU seconds of the first call with all that it starts;
gradients are compared with plain BPTT's.

A row is saved in ``results/linear.json`` as soon as it is measured; ``--only`` names rows, ``--show`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from measuring import cost_of, cpu_seconds, gradients, interleaved, pinned, relative_error, summary, training_step
from rich.console import Console
from rich.table import Table
from speed import EAGER, measure_rows
from speed_networks import Checkpointed, Network, State
from torch import Tensor, nn

import reroll
from reroll.segment.linear import cores

CHECKPOINT, TOGETHER, ONE_BY_ONE = "torch.utils.checkpoint", "reroll, together", "reroll, one by one"
LEFT = tuple(name for name in reroll.DEFAULT_PASSES if name != "linear-steps")
OURS: Mapping[str, Mapping[str, Any]] = {TOGETHER: {}, ONE_BY_ONE: {"passes": LEFT}}
HEADS = 4


@dataclass(frozen=True)
class Point:
    """Rows and columns of the state of a head, and other sizes."""

    size: int
    batch: int
    steps: int = 256


POINTS: Mapping[str, Point] = {
    "16 x 16, batch 32": Point(16, 32),
    "32 x 32, batch 8": Point(32, 8),
    "64 x 64, batch 8": Point(64, 8),
    "64 x 64, batch 32": Point(64, 32, 128),
    "128 x 128, batch 8": Point(128, 8, 128),
}


class Retention(Network):
    """Queries, keys, values and decays of the input; what is read of the state, summed up."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.sizes = size, ((HEADS, size, size), (10,))
        self.q, self.k, self.v = (nn.Linear(64, HEADS * size) for _ in range(3))
        self.gate, self.out = nn.Linear(64, HEADS), nn.Linear(HEADS * size, 10)

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """The state of each head, and the sum."""
        state_BNDE, sum_BO = state
        q_BND, k_BND, v_BNE = (of(x_BI).unflatten(1, (HEADS, self.size)) for of in (self.q, self.k, self.v))
        decay_BN11 = torch.sigmoid(4 + self.gate(x_BI))[:, :, None, None]
        state_BNDE = decay_BN11 * state_BNDE + k_BND[..., None] * v_BNE[..., None, :]
        y_BNE = torch.einsum("bnd,bnde->bne", q_BND, state_BNDE)
        return state_BNDE, sum_BO + self.out(y_BNE.flatten(1))


def row(point: Point, rounds: int, core: int | None, **options: Any) -> dict[str, Any]:
    """One size; ``options`` are those of ``reroll.compile``."""
    torch.manual_seed(0)
    network, x = Retention(point.size), torch.randn(point.steps, point.batch, 64)
    with pinned(core), mock.patch.object(cores, "LEAST", 1):
        ours = {way: reroll.compile(network, start="compiled", **options, **given) for way, given in OURS.items()}
        models = {EAGER: network, CHECKPOINT: Checkpointed(network), **ours}
        training, found = {way: training_step(model, network, x) for way, model in models.items()}, {}
        expected = gradients(training[EAGER], network)
        for way, step in training.items():
            began = cpu_seconds()
            error = relative_error(gradients(step, network), expected)
            first = cpu_seconds() - began
            network.zero_grad(set_to_none=True)
            peak = cost_of(step, [network]).local_peak
            found[way] = {"relative_error": error, "local_peak_bytes": peak, "first_s": first}
        times = summary(interleaved(training, rounds), EAGER)
    return {"steps": point.steps, "contenders": {way: {**found[way], **times[way]} for way in found}}


def show(result: dict[str, Any]) -> None:
    """Time and memory of all, as parts of eager's."""
    ways = (EAGER, CHECKPOINT, TOGETHER, ONE_BY_ONE)
    table = Table("", *ways, title="time as a part of eager's; peak in MB; CPU seconds of the first call")
    for name, each in result.items():
        cells = []
        for way in ways:
            of = each["contenders"][way]
            cells.append(f"{of['median_ratio']:.2f}; {of['local_peak_bytes'] / 1e6:.1f}; {of['first_s']:.1f}")
        table.add_row(name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    measure_rows(__file__, __doc__, list(POINTS), lambda name, *how: row(POINTS[name], *how), show, core=0)
