"""The relation of every operand of a candidate region to its step.

Each operand column of a candidate must keep one relation over its steps: the same distance back (a value of this step,
or a carry of d steps ago), one value from outside, a list of values from outside, or an index that moves evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from reroll.capture.folded import Gapped, is_row, written_for
from reroll.capture.steps.node_hash import OUTSIDE, Gap, Ints, Sequence
from reroll.graph.lines import where

MIN_STEPS = 3
_SEVERAL = 4  # runs that are one step
_MAP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes [start, start + period * steps) of the sequence are ``steps`` runs of one step of ``period`` nodes."""

    start: int
    period: int
    steps: int

    @property
    def stop(self) -> int:
        """The first node after the region."""
        return self.start + self.period * self.steps

    @property
    def size(self) -> int:
        """Nodes that it covers."""
        return self.period * self.steps


def columns(sequence: Sequence, region: Region) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Operand codes and moving numbers of a region, one row a step; numbers as if no step were missing."""
    first, last = sequence.offset[region.start], sequence.offset[region.stop]
    code = sequence.code[first:last].reshape(region.steps, -1)
    number = sequence.number[first:last].reshape(region.steps, -1)
    for gap, missing in gaps_in(sequence, region):
        leaves = np.diff(sequence.offset[region.start : region.stop + 1])
        behind = np.repeat(gap.behind[region.start : region.stop], leaves).reshape(region.steps, -1)
        before = max((gap.at - region.start) // region.period - 1, 1)  # a whole step before the gap, as that before it
        number = number - behind * missing * (number[before] - number[before - 1])
    return code, number


def gaps_in(sequence: Sequence, region: Region) -> Iterator[tuple[Gap, int]]:
    """The gaps inside of a region, with the number of its steps that are missing there. Raises Gapped where steps are
    none of the runs that are missing, or the first two or the last one are not whole before and behind it."""
    for gap in sequence.gaps:
        if region.start < gap.at < region.stop:
            several, rest = divmod(region.period, gap.period)
            first, last = gap.behind[region.start :][: 2 * region.period], gap.behind[: region.stop][-region.period :]
            if rest or several > _SEVERAL or gap.runs % several or first.any() or not last.all():
                raise Gapped
            yield gap, gap.runs // several


def numbered(sequence: Sequence, region: Region, place: int) -> list[int]:
    """The numbers of the steps of a region that are there, for node ``place`` of a step."""
    found = np.arange(region.steps)
    for gap, missing in gaps_in(sequence, region):
        found += missing * gap.behind[region.start + place : region.stop : region.period]
    return [int(each) for each in found]


def relations(sequence: Sequence, region: Region) -> Ints:
    """Each operand's relation: the distance back from the first node of its step, or ``OUTSIDE`` + identity."""
    code, _ = columns(sequence, region)
    # Step r begins at node base[r] = start + period * r. A step that reads the node ``code`` is repeated by one that
    # reads the node ``period`` later, so equal steps have equal distances d = base[r] - code: d <= 0 is node -d of the
    # same step, d > 0 was made ceil(d / period) steps ago (``delay``).
    base = region.start + region.period * np.arange(region.steps)[:, None]
    return np.where(code >= OUTSIDE, code, np.where(code < 0, OUTSIDE - 1, base - code))


def delay(relation: int, period: int) -> int:
    """How many steps ago a value at this distance was made; 0 for a value of the same step."""
    return -(-relation // period) if relation > 0 else 0


def window(sequence: Sequence, region: Region) -> Region | None:
    """The longest stretch of steps over which every operand keeps its relation."""
    try:
        return _window(sequence, region)
    except Gapped:
        return None


def _window(sequence: Sequence, region: Region) -> Region | None:
    if region.steps < MIN_STEPS:
        return None
    code, number = columns(sequence, region)
    relation = relations(sequence, region)
    carries = bool(np.any((relation > 0) & (code >= region.start) & (code < OUTSIDE)))
    if not sequence.maps and not carries:
        return None  # nothing is carried, whatever the window
    first = sequence.offset[region.start]
    moving = number[:, sequence.index[first : first + number.shape[1]]]
    apart = () if carries else _reader_breaks(sequence, region)
    breaks = sorted({*_relation_breaks(relation, code, region), *_index_breaks(moving), *apart})
    best = _longest_stretch(breaks, region.steps)
    found = Region(region.start + best[0] * region.period, region.period, best[1] - best[0])
    return found if found.steps >= MIN_STEPS and classify(sequence, found) else None


def _longest_stretch(breaks: list[tuple[int, int]], steps: int) -> tuple[int, int]:
    """The longest [low, high) in which each break (step, delay) is among the first ``delay`` steps, or outside."""
    # A longest stretch cannot begin one step earlier: it begins at 0, or at - (low - 1) = back for one of the breaks.
    # It ends before the first break that is not among its first ``back`` steps.
    best = (0, 0)
    ats = np.array([at for at, _ in breaks], np.int64)
    backs = np.array([back for _, back in breaks], np.int64)
    for low in sorted({0, *(at - back + 1 for at, back in breaks), *(at for at, _ in breaks)}):
        after = ats[ats >= low + backs]
        high = int(after.min()) if len(after) else steps
        if low >= 0 and high - low > best[1] - best[0]:
            best = (low, high)
    return best


def _relation_breaks(relation: Ints, code: Ints, region: Region) -> Iterator[tuple[int, int]]:
    """(step, delay): a window [l, h) may hold the step only among its first ``delay`` ones."""
    outside = (code < region.start) | (code >= OUTSIDE)
    for at_column in np.flatnonzero(np.any(relation != relation[:1], axis=0)):
        column, read = relation[:, at_column], code[:, at_column]
        same = np.count_nonzero(read[1:] == read[:-1])
        if np.all(outside[:, at_column]) and same < len(column) // 2:
            continue  # another value from outside at every step: a list
        fixed = np.count_nonzero(outside[:, at_column]) > len(column) // 2 or 2 * same > len(column)
        kept = read if fixed else column
        # The steady relation is that of the longest run. A carry of ``back`` steps ago reads what the loop was given at
        # its first ``back`` steps, so there it may differ; one value from outside may nowhere.
        steady = _longest_run_value(kept)
        back = 0 if kept is not column else delay(steady, region.period)
        for at in np.flatnonzero(kept != steady).tolist():
            yield at, back
        if fixed and region.start <= steady < OUTSIDE:  # one value for all steps, made in one that they must not hold
            yield (steady - region.start) // region.period, 0


def _reader_breaks(sequence: Sequence, region: Region) -> Iterator[tuple[int, int]]:
    """Steps of a map whose values are read by other operations than those of most, or that read what others made: a
    loss of the ones would give the others a gradient of zeros, where eager gives none."""
    read = [
        tuple(_around(sequence, at, base, base + region.period) for at in range(base, base + region.period))
        for base in range(region.start, region.stop, region.period)
    ]
    usual, _ = Counter(read).most_common(1)[0]
    yield from ((at, 0) for at, each in enumerate(read) if each != usual)


def _around(sequence: Sequence, at: int, start: int, stop: int) -> tuple[frozenset[int], frozenset[int]]:
    """The colours of the operations that read a node, and of those that it reads, but for those of its step."""
    node = sequence.nodes[at]
    readers = [reader for user in node.users for reader in (user.users if is_row(user) else (user,))]
    return _colours(sequence, readers, start, stop), _colours(sequence, node.all_input_nodes, start, stop)


def _colours(sequence: Sequence, nodes: Iterable[fx.Node], start: int, stop: int) -> frozenset[int]:
    places = {sequence.position.get(written_for(node), -1) for node in nodes}
    return frozenset(-1 if place < 0 else int(sequence.colour[place]) for place in places if not start <= place < stop)


def _longest_run_value(column: Ints) -> int:
    edges = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1], [True])))
    return int(column[edges[int(np.argmax(np.diff(edges)))]])


def _index_breaks(number: npt.NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Steps at which an index leaves its even movement; a break of the slope excludes what is before or after it."""
    slopes = np.diff(number, axis=0)
    for column in slopes.T[np.any(np.abs(slopes - slopes[:1]) > 1e-9, axis=0)]:
        # Slope ``at`` is between the steps ``at`` and ``at`` + 1: a window may begin with the second, not hold both.
        rounded = np.round(column * 2**32).astype(np.int64)
        steady = _longest_run_value(rounded)
        for at in np.flatnonzero(rounded != steady).tolist():
            yield at + 1, 1


@dataclass(frozen=True, slots=True)
class Inner:
    """The value of node ``place`` of the same step."""

    place: int


@dataclass(frozen=True, slots=True)
class Carried:
    """The value of node ``place`` of ``delay`` steps ago; ``initial[j]`` is that of j + 1 steps before the first."""

    place: int
    initial: tuple[fx.Node, ...]

    @property
    def delay(self) -> int:
        """How many steps ago it was made."""
        return len(self.initial)


@dataclass(frozen=True, slots=True)
class Constant:
    """One value from outside, the same at every step."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class ItemsOf:
    """``nodes[i]``, a value from outside, at step ``steps[i]``."""

    nodes: tuple[fx.Node, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moving:
    """The number ``values[r]`` at step r."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The index ``start + stride * r`` at step r, of a select."""

    start: int
    stride: int


@dataclass(frozen=True, slots=True)
class Literal:
    """Anything that is no value of the graph, as it stands at every step."""


Operand = Inner | Carried | Constant | ItemsOf | Moving | Index | Literal
"""The relation of one operand of a step to the step."""


def classify(sequence: Sequence, region: Region) -> list[list[Operand]] | None:
    """The relation of every operand, one list a node of the step.

    None if one has none, or if nothing is carried by a step that has to.
    """
    found: list[list[Operand]] = [[] for _ in range(region.period)]
    for place, _, operand, _ in _operands(sequence, region):
        if operand is None:
            return None
        found[place].append(operand)
    flat = [operand for operands in found for operand in operands]
    moves = any(isinstance(operand, Index | ItemsOf) for operand in flat)
    maps = sequence.maps and region.steps >= _MAP_STEPS and moves
    return found if maps or any(isinstance(operand, Carried) for operand in flat) else None


def why_not(sequence: Sequence, region: Region) -> str:
    """Why a run of equal operations is no recurrence: the first operand that keeps no relation, or what else."""
    carried = False
    for place, index, operand, values in _operands(sequence, region):
        line = where(sequence.nodes[region.start + place])
        if operand is None and index:
            return f"the index at {line} does not move evenly: {', '.join(f'{v:g}' for v in values[:6])}, ..."
        if operand is None:
            return f"an operand at {line} is now a value of the steps, now one from outside, or from varying steps ago"
        carried = carried or isinstance(operand, Carried)
    if not carried:
        return "no value is carried from step to step, so the steps can be one batched operation instead"
    return "its steps differ in their gradient modes or effects, or what they hand on is not all tensors"


def _operands(sequence: Sequence, region: Region) -> Iterator[tuple[int, bool, Operand | None, list[float]]]:
    """(place in the step, whether it is an index, its relation, its numbers) of every operand of the step."""
    code, number = columns(sequence, region)
    relation = relations(sequence, region)
    leaves = [sequence.operands[at] for at in range(region.start, region.stop)]
    column = 0
    for place in range(region.period):
        for slot in range(len(leaves[place])):
            each = tuple(leaves[r * region.period + place][slot] for r in range(region.steps))
            index = bool(sequence.index[sequence.offset[region.start] + column])
            values = number[:, column]
            found = _operand(region, each, code[:, column], relation[:, column], values, index)
            if sequence.gaps and isinstance(found, ItemsOf | Moving):
                found = _with_missing(sequence, region, place, found)
            yield place, index, found, values.tolist()
            column += 1


def _with_missing(sequence: Sequence, region: Region, place: int, found: ItemsOf | Moving) -> ItemsOf | Moving:
    """Items at the steps where they are read; numbers also at those that are missing, where they grow evenly."""
    steps = numbered(sequence, region, place)
    if isinstance(found, ItemsOf):
        return replace(found, steps=tuple(steps))
    values = list[float]()
    for step, value in zip(steps, found.values, strict=True):
        if step > len(values) and not (type(values[-1]) is type(values[-2]) is int):
            raise Gapped
        while len(values) < step:
            values.append(2 * values[-1] - values[-2])
        values.append(value)
    return Moving(tuple(values))


def _moving(values: tuple[Any, ...], number: npt.NDArray[np.float64], index: bool) -> Operand | None:
    slopes = np.diff(number)
    if not np.any(slopes):
        return Literal()
    if not index:
        return Moving(values)
    return Index(int(number[0]), int(slopes[0])) if np.all(slopes == slopes[0]) else None


def _operand(
    region: Region, leaves: tuple[Any, ...], code: Ints, relation: Ints, number: npt.NDArray[np.float64], index: bool
) -> Operand | None:
    if not isinstance(leaves[-1], fx.Node):
        return _moving(leaves, number, index)
    outside = (code < region.start) | (code >= OUTSIDE)
    if outside[-1]:
        if not np.all(outside):
            return None
        return Constant(leaves[0]) if np.all(code == code[0]) else ItemsOf(leaves, tuple(range(region.steps)))
    back = delay(int(relation[-1]), region.period)
    if np.any(relation[back:] != relation[-1]) or not np.all(outside[:back]):
        return None
    place = int(back * region.period - relation[-1])
    return Carried(place, leaves[:back][::-1]) if back else Inner(place)
