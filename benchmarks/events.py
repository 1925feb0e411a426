"""Event products against torch's dense ones, by shape and density: ``python benchmarks/events.py``.

For each shape M x K x N: the time of ``z W`` and ``z^T g`` by events, relative to torch's product of the same operands
(medians of calls that take turns, one pinned core), at several densities of z; the density at which both take the same
time; and what a look at a z that is dense after all costs. The result goes to ``results/events.json``; ``CROSSOVER``,
``SPIKES`` and ``INPUTS`` of ``passes/event_products.py`` are read off it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measuring import machine, pinned
from rich.console import Console
from rich.table import Table
from torch import Tensor

from reroll import event_ops  # noqa: F401  # defines the operations
from reroll.backends import events

RESULT = Path(__file__).resolve().parent / "results" / "events.json"
SHAPES = [(32, 256, 256), (256, 256, 256), (256, 64, 256), (32, 512, 512), (32, 1024, 1024), (256, 256, 1024)]
DENSITIES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
Call = Callable[[], object]


def medians(calls: list[Call], rounds: int) -> list[float]:
    """Seconds of each call; they take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, seconds, strict=True):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
    return [statistics.median(each) for each in seconds]


def row(m: int, k: int, n: int, density: float, rounds: int) -> dict[str, float]:
    """Times at one density, relative to dense products; ``look``: a z that is multiplied densely in the end."""
    ops = torch.ops.reroll
    z, g = (torch.rand(m, k) < density).float(), torch.randn(m, n)
    weight = torch.randn(n, k)
    turned: Tensor = ops.event_rows(weight.T)
    product, by_events, look, outer, outer_by_events, outer_look = medians(
        [
            lambda: torch.mm(z, weight.T),
            lambda: ops.event_product(None, z, turned, 1.0, 0),
            lambda: ops.event_product(None, z, weight.T, -1.0, 0),
            lambda: torch.mm(z.T, g),
            lambda: ops.event_outer(z, g, 1.0, 0),
            lambda: ops.event_outer(z, g, -1.0, 0),
        ],
        rounds,
    )
    return {
        "dense_us": 1e6 * product,
        "product": by_events / product,
        "product_look": look / product,
        "outer": outer_by_events / outer,
        "outer_look": outer_look / outer,
    }


def crossover(rows: dict[float, dict[str, float]], kind: str) -> float | None:
    """The density at which events take as long as a dense product, between two that were measured."""
    for (low, before), (high, after) in pairwise(rows.items()):
        if before[kind] <= 1 < after[kind]:
            return low + (high - low) * (1 - before[kind]) / (after[kind] - before[kind])
    return None


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--core", type=int, default=1)
    options = parser.parse_args()
    assert events.built()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    table = Table(
        "M x K x N", "product at 0.1", "equal at", "outer at 0.1", "equal at", "looks", title="events / dense"
    )
    with pinned(options.core), torch.no_grad():
        for shape in SHAPES:
            rows = {density: row(*shape, density, options.rounds) for density in DENSITIES}
            equal = {kind: crossover(rows, kind) for kind in ("product", "outer")}
            looks = {kind: statistics.median(each[kind] for each in rows.values()) for kind in _LOOKS}
            name = " x ".join(map(str, shape))
            found[name] = {"densities": rows, "equal_at": equal, "looks": looks}
            cells = [cell for kind in equal for cell in (f"{rows[0.1][kind]:.2f}", f"{equal[kind] or 1:.2f}")]
            table.add_row(name, *cells, ", ".join(f"{each:.2f}" for each in looks.values()))
    result = {"shapes": found, "environment": machine("python benchmarks/events.py")}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=110).print(table)


_LOOKS = ("product_look", "outer_look")

if __name__ == "__main__":
    main()
