"""Blocks over depth: steps that differ in their weights alone, taken where they make enough to pay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import fx

from reroll.capture.steps.node_hash import Likeness, Sequence
from reroll.capture.steps.search import with_more, worthwhile
from reroll.capture.steps.step import Step
from reroll.graph.effects import example
from reroll.graph.lines import where

_LEAST_SHARE = 0.1  # of the bytes that all operations make: blocks that make less are left to torch


@dataclass(frozen=True)
class Blocks:
    """``steps``: those over time and over depth, in program order; ``small``: why blocks were left, if they were.

    ``sequence``: the graph as it was looked at last, where all that differs is left out.
    """

    sequence: Sequence
    steps: list[Step]
    small: str = ""


def with_blocks(module: fx.GraphModule, found: Sequence, steps: list[Step]) -> Blocks:
    """The steps over time that a sequence has, and blocks between them."""
    made = np.array([0 if value is None else value.nbytes for value in map(example, found.nodes)])
    for gap in found.gaps:
        made[gap.at - gap.period : gap.at] *= 1 + gap.runs
    if sum(_share(made, step) for step in steps) > 1 - _LEAST_SHARE:
        return Blocks(found, steps)
    small = ""
    for likeness in (Likeness.WEIGHTS, Likeness.FROZEN):
        sequence = Sequence(module, found.graph, likeness)
        kept = []
        for step in with_more(steps, sequence):
            if step in steps or _share(made, step) >= _LEAST_SHARE:
                kept.append(step)
            else:
                small = small or _too_small(sequence, step, _share(made, step))
        steps = kept
    return Blocks(sequence, worthwhile(steps), small)


def _share(made: npt.NDArray[np.int64], step: Step) -> float:
    """The share of the bytes of all operations that a step's make, at all its turns."""
    return int(made[step.region.start : step.region.stop].sum()) / max(int(made.sum()), 1)


def _too_small(sequence: Sequence, step: Step, share: float) -> str:
    return (
        f"{step.region.steps} equal blocks begin at {where(sequence.nodes[step.region.start])}, but they make "
        f"{share:.1%} of what the graph makes, and less than {_LEAST_SHARE:.0%} does not pay"
    )
