"""The constants of event products are those that the committed measurement says (``benchmarks/events.py``)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from reroll.passes.segment import event_products, pack_weights

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "events.json"
SHAPES = json.loads(RESULT.read_text())["shapes"]
SLOWER = 1.06  # what a product may lose at the density of the constant, of any shape that was measured
LOOKS = ("product_look", "outer_look", "packed_look")


def relative(shape: str, kind: str, density: float) -> float:
    """The time of a kind at a density, relative to the dense product in its place, between two measured ones."""
    rows = [(float(at), row[kind]) for at, row in SHAPES[shape]["densities"].items()]
    dense = SHAPES[shape]["looks"]["packed"] if kind == "packed_events" else 1.0
    (low, before), (high, after) = next(pair for pair in pairwise(rows) if density <= pair[1][0])
    between: float = before + (after - before) * (density - low) / (high - low)
    return between / dense


def constant(shape: str, kind: str) -> float:
    """The density up to which a product of a shape M x K x N is done by events."""
    rows = int(shape.split(" x ")[0])
    return {
        "product": event_products.CROSSOVER,
        "outer": event_products.outer_crossover(rows),
        "packed_events": pack_weights.CROSSOVER,
    }[kind]


@pytest.mark.parametrize("kind", ["product", "outer", "packed_events"])
def test_events_are_no_slower_than_dense_products_where_they_are_taken(kind: str) -> None:
    slower = {shape: found for shape in SHAPES if (found := relative(shape, kind, constant(shape, kind))) > SLOWER}
    assert not slower


@pytest.mark.parametrize("kind", ["product", "outer", "packed_events"])
def test_dense_products_are_not_taken_where_events_are_faster_throughout(kind: str) -> None:
    faster = [shape for shape in SHAPES if relative(shape, kind, constant(shape, kind) + 0.1) < 1]
    assert len(faster) < len(SHAPES), f"of all shapes {kind} wins at 0.1 more than the constant, too"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_look_at_an_operand_that_is_dense_after_all_costs_little(shape: str) -> None:
    multiplications = 1
    for size in map(int, shape.split(" x ")):
        multiplications *= size
    assert multiplications >= event_products.SPIKES, "no look is taken at products that are smaller"
    most = 1.1 if multiplications >= event_products.INPUTS else 1.25
    assert all(SHAPES[shape]["looks"][kind] <= most for kind in LOOKS)
