"""Plans that a planner weighed against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan by its name: predicted local ``peak`` in bytes, ``seconds`` of one training step, ``rerun`` steps.

    ``tiers``: bytes at the peak of each remote tier. ``chosen``: whether this is the plan that was taken.
    """

    name: str
    peak: int
    seconds: float
    rerun: int
    tiers: Mapping[str, int] = field(default_factory=dict)
    chosen: bool = False


def pareto(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Those that no other beats in bytes without losing in seconds, the smallest peak first (the Pareto curve)."""
    found: list[Alternative] = []
    for each in sorted(alternatives, key=lambda each: (each.peak, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return found
