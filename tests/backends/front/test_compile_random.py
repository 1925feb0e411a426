"""Random programs at lengths that were never traced: ``reroll.compile`` is right, or refuses; never wrong."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch

import reroll
from agreement import differences, results
from random_programs import WIDTH, Program

SEEDS = tuple(map(int, os.environ.get("REROLL_SEEDS", "2,12,14,15").split(",")))
MORE = tuple(seed for seed in range(64) if seed not in SEEDS)  # some take 30 seconds
LENGTHS = (13, 5, 31)
SHORTEST_LOOKED_AT = 8


def check(seed: int) -> int:
    """Compare a program with eager at every length; how often it agreed where torch does not run it as it is.

    What eager cannot do itself is left out.
    """
    torch.manual_seed(seed)
    torch.compiler.reset()
    model, agreed = Program(seed).double(), 0
    twin = copy.deepcopy(model)
    schedule: dict[str, Any] = {"schedule": "standard"} if seed % 2 else {"schedule": "double", "chunk": 5, "slots": 2}
    run = reroll.compile(twin, lowering="eager", **schedule)
    for steps in LENGTHS:
        x_TBW = torch.randn(steps, model.batch, WIDTH, dtype=torch.float64)
        try:
            expected = results(model, model, (x_TBW,))
        except (RuntimeError, IndexError):
            continue
        different = differences(results(run, twin, (x_TBW,)), expected, 1e-10)
        assert not different, (
            f"program {seed} at {steps} steps: {different}, {model.steps}, {model.order}, {model.ending}"
        )
        agreed += steps >= SHORTEST_LOOKED_AT
    return agreed


@pytest.mark.slow
def test_random_programs_are_never_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reroll.RerollWarning)
        agreed = sum(check(seed) for seed in SEEDS)
    assert agreed >= len(SEEDS)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(12))
def test_more_random_programs_are_never_wrong(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reroll.RerollWarning)
        agreed = sum(check(seed) for seed in MORE[part::12])
    assert agreed > 0
