"""Products of our own against torch's dense ones, by shape and density: ``python benchmarks/events.py``.

For each shape M x K x N: the time of ``z W`` and ``z^T g`` by events, and of ``z W`` with a packed weight, dense and by
events, relative to torch's product of the same operands (medians of calls that take turns, one pinned core), at several
densities of z; the density at which both take the same time; and what a look at a z that is dense after all costs.
Packed products are measured as inductor calls them: many in one compiled function. The result goes to
``results/events.json``, from which the constants of ``passes/segment/event_products.py`` and ``pack_weights.py`` are
read off; ``tests/project/measured/test_events.py`` compares them.
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
from measuring import keep_pages, machine, pinned
from rich.console import Console
from rich.table import Table
from torch import Tensor

from reroll.backends.inductor import event_counts as events
from reroll.backends.inductor.native_products import edition, register
from reroll.backends.inductor.wrapper_codegen.unit import quick_builds
from reroll.segment.ops import PACK, PACKED_EVENTS, PACKED_PRODUCT

RESULT = Path(__file__).resolve().parent / "results" / "events.json"
SHAPES = [(32, 256, 256), (256, 256, 256), (256, 64, 256), (32, 512, 512), (32, 1024, 1024), (256, 256, 1024)]
DENSITIES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
MANY, EDITION = 16, edition()  # products with packed weights in a call
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


@torch.compile(fullgraph=True, dynamic=False)
def packed(zs: list[Tensor], panels: Tensor, columns: int) -> list[Tensor]:
    """Dense products with a packed weight."""
    return [PACKED_PRODUCT(z, panels, columns, EDITION) for z in zs]


@torch.compile(fullgraph=True, dynamic=False)
def packed_events(zs: list[Tensor], panels: Tensor, counts: Tensor, columns: int, crossover: float) -> list[Tensor]:
    """The same by events up to a density."""
    return [PACKED_EVENTS(z, panels, counts, columns, crossover, EDITION) for z in zs]


def row(m: int, k: int, n: int, density: float, rounds: int) -> dict[str, float]:
    """Times at one density, relative to dense products; ``look``: a z that is multiplied densely in the end."""
    ops = torch.ops.reroll
    zs, g = [(torch.rand(m, k) < density).float() for _ in range(MANY)], torch.randn(m, n)
    z, weight = zs[0], torch.randn(n, k)
    turned, panels, counts = ops.event_rows(weight.T), PACK(weight.T), torch.zeros(4, dtype=torch.int64)
    calls: dict[str, Call] = {
        "dense": lambda: torch.mm(z, weight.T),
        "product": lambda: ops.event_product(None, z, turned, 1.0, 0),
        "product_look": lambda: ops.event_product(None, z, weight.T, -1.0, 0),
        "dense_outer": lambda: torch.mm(z.T, g),
        "outer": lambda: ops.event_outer(z, g, 1.0, 0),
        "outer_look": lambda: ops.event_outer(z, g, -1.0, 0),
        "dense_many": lambda: [torch.mm(each, weight.T) for each in zs],
        "packed": lambda: packed(zs, panels, n),
        "packed_events": lambda: packed_events(zs, panels, counts, n, 1.0),
        "packed_look": lambda: packed_events(zs, panels, counts, n, -1.0),
    }
    seconds = dict(zip(calls, medians(list(calls.values()), rounds), strict=True))
    dense_of = {"outer": "dense_outer", "outer_look": "dense_outer", "product": "dense", "product_look": "dense"}
    ratios = {name: each / seconds[dense_of.get(name, "dense_many")] for name, each in seconds.items()}
    kept = {name: ratio for name, ratio in ratios.items() if not name.startswith("dense")}
    return {"dense_us": 1e6 * seconds["dense"], **kept}


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
    keep_pages()
    found: dict[str, Any] = {}
    register()
    names = ("product", "outer", "packed_events")
    heads = [head for name in names for head in (f"{name} at 0.1", "equal at")]
    table = Table("M x K x N", *heads, "packed dense", "looks", title="time / torch's dense product")
    with pinned(options.core), torch.no_grad(), quick_builds():
        for shape in SHAPES:
            torch.compiler.reset()  # one shape after another is no reason for dynamic ones
            rows = {density: row(*shape, density, options.rounds) for density in DENSITIES}
            equal = {kind: crossover(rows, kind) for kind in names}
            looks = {kind: statistics.median(each[kind] for each in rows.values()) for kind in _ALWAYS}
            name = " x ".join(map(str, shape))
            found[name] = {"densities": rows, "equal_at": equal, "looks": looks}
            cells = [cell for kind in equal for cell in (f"{rows[0.1][kind]:.2f}", f"{equal[kind] or 1:.2f}")]
            dense, *rest = looks.values()
            table.add_row(name, *cells, f"{dense:.2f}", ", ".join(f"{each:.2f}" for each in rest))
    result = {
        "shapes": found,
        "environment": machine(f"python benchmarks/events.py --rounds {options.rounds} --core {options.core}"),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=130).print(table)


_ALWAYS = ("packed", "product_look", "outer_look", "packed_look")  # that do not depend on the density

if __name__ == "__main__":
    main()
