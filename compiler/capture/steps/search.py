"""Find the steps that repeat: runs of equal colours in program order whose operands keep one relation.

A run of colours that equals itself shifted by P nodes is a candidate for a step of P nodes. Longest coverage wins, then
the shortest period; a step starts where the fewest bytes cross from step to step. Spikes count as bits,
as which they are kept.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from reroll.capture.steps.node_hash import Sequence, kept_nbytes
from reroll.capture.steps.operands import MIN_STEPS, Region, window
from reroll.capture.steps.step import Step, analyse

_CANDIDATES = 400
_MULTIPLES = 16
_HUGE = 1e12
_PEELED = 5
_FEW_STEPS = 8
_TINY = 8
Run = tuple[int, int, int, int]


def find_steps(sequence: Sequence, low: int = 0, high: int | None = None) -> list[Step]:
    """All steps in a part of the sequence, in program order: the best one, then what is left and right of it."""
    found: list[Step] = []
    ranges = [(low, len(sequence.nodes) if high is None else high)]
    while ranges:
        low, high = ranges.pop()
        best = _best(sequence, low, high)
        if best is not None:
            found.append(best)
            ranges += [(low, best.region.start), (best.region.stop, high)]
    return sorted(found, key=lambda step: step.region.start)


def with_more(steps: list[Step], sequence: Sequence) -> list[Step]:
    """The steps, and those that a sequence of the same nodes has between them, in program order."""
    borders = [0, *(at for step in steps for at in (step.region.start, step.region.stop)), len(sequence.nodes)]
    between = zip(borders[::2], borders[1::2], strict=True)
    more = [step for low, high in between for step in find_steps(sequence, low, high)]
    return sorted([*steps, *more], key=lambda step: step.region.start)


def worthwhile(steps: list[Step]) -> list[Step]:
    """Without repetitions that are both short and tiny beside the largest: they cost more to compile than they save."""
    largest = max((step.size for step in steps), default=0)
    return [s for s in steps if s.count >= _FEW_STEPS or s.size * _TINY >= largest]


def covered(steps: list[Step]) -> int:
    """How many nodes lie in the steps, also those that are missing."""
    return sum(step.size for step in steps)


def _best(sequence: Sequence, low: int, high: int) -> Step | None:
    best: Step | None = None
    spans: Counter[tuple[int, int]] = Counter()
    for tried, (covered, period, start, stop) in enumerate(repeats(sequence.colour[low:high])):
        size = best.region.size if best else 0
        if tried >= _CANDIDATES or size + period >= covered:
            break
        spans[start, stop] += 1
        if spans[start, stop] > _MULTIPLES:
            continue
        first = rotation(sequence, low + start, low + stop, period)
        for at in dict.fromkeys((first, low + start)):
            step = _longest_from(sequence, at, low + stop, period)
            if step is not None and step.region.size > _to_beat(best, period):
                best = step
                break
    return best


def _longest_from(sequence: Sequence, at: int, stop: int, period: int) -> Step | None:
    """The longest step of a run that begins at a node, or at one in the first step if that is left out otherwise: the
    run may begin with a value that is made like one of the steps, and that all of them read."""
    found = _step(sequence, at, stop, period)
    if found is None or found.region.start - at != period:
        return found
    later = _step(sequence, rotation(sequence, at + 1, stop, period), stop, period)
    return later if later is not None and later.region.size > found.region.size else found


def _step(sequence: Sequence, at: int, stop: int, period: int) -> Step | None:
    region = window(sequence, Region(at, period, (stop - at) // period))
    return analyse(sequence, region) if region is not None else None


def _to_beat(best: Step | None, period: int) -> int:
    """Nodes that a step must cover more than: several steps in one only if what both peel does not decide.

    Otherwise two steps would be taken for one at some lengths and not at others.
    """
    if best is None:
        return 0
    single = best.region.period
    return best.region.size + (max(period, _PEELED * single) if period > single and period % single == 0 else 0)


def repeats(colour: npt.NDArray[np.int32]) -> list[Run]:
    """(covered nodes, period, start, stop) of maximal runs that repeat; longest first, then shortest period."""
    found: list[Run] = []
    size = len(colour)
    colour = colour.astype(np.int16) if size and colour.max() < 2**15 else colour
    for period in range(1, size // MIN_STEPS + 1):
        same = colour[:-period] == colour[period:]
        if np.count_nonzero(same) < 2 * period:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).view(np.int8)))
        lengths = edges[1::2] - edges[::2]
        for at in np.flatnonzero(lengths >= 2 * period).tolist():
            start, stop = int(edges[2 * at]), int(edges[2 * at + 1])
            found.append((stop - start + period, period, start, stop + period))
    return sorted(found, key=lambda run: (-run[0], run[1]))


def rotation(sequence: Sequence, start: int, stop: int, period: int) -> int:
    """The first node of a step: the fewest bytes cross from step to step, and no ``no_grad`` is open if it can be."""
    middle = start + max((stop - start) // period // 2, 1) * period
    low, high = max(start, middle - 2 * period), min(stop, middle + 3 * period)
    live = np.zeros(high - low + 1)
    for at in range(low, high):
        node = sequence.nodes[at]
        uses = [p for user in node.users if (p := sequence.position.get(user)) is not None and at < p < stop]
        if uses:
            weight = _HUGE if (nbytes := kept_nbytes(sequence, node)) is None else nbytes
            live[at + 1 - low] += weight
            live[min(max(uses) + 1, high) - low] -= weight
    crossing = np.cumsum(live)
    costs = [
        (crossing[at - low] + _HUGE * _opened(sequence, at), at - middle)
        for at in range(middle, min(middle + period, high))
        if stop - start - (at - middle) >= MIN_STEPS * period
    ]
    return start + (min(costs)[1] if costs else 0)


def _opened(sequence: Sequence, at: int) -> int:
    """How many ``no_grad``, autocast and inference regions are open before a node."""
    grad, regions = sequence.modes[at]
    return len(regions) + (0 if grad else 1)
