"""What repeats while a model is recorded: no run of it is written down once it is known what comes.

After some equal runs of a few operations, of which all numbers grow evenly, the next operations are known: function,
operands and numbers. Each that comes is compared with the one that is expected, runs, and is only counted. The first
other one ends that. Then the last runs are written as nodes, like those before, and a mark stands for the others
(``reroll.capture.folded``): nothing is inferred, as every operation has been seen.

Each node has a *place*, a number that counts those that are not written down, too. So an operand is a number like any
other: that of a value of the run before grows by the size of a run, that of a row of an earlier loop by that loop's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll.capture.folded import SIDE, row_of_run, run_ended, skipped_runs
from reroll.graph.editing import flatten, rebuild
from reroll.graph.fakes import Fakes
from reroll.graph.inplace import operand, updated_places
from reroll.graph.nested import tensors_of
from reroll.graph.private import map_aggregate, storage_id

RECORDED = 8
"""Equal runs that are written down before any is skipped: a step of several of them repeats in these, too."""
COMPARED = 4
"""Last ones of these whose operands and numbers are compared."""
KEPT = 8
"""Runs at the end that are written down."""
WHOLE = 12
"""A multiple of this many runs is skipped, so that it is one of steps that are several runs."""
LONGEST = 4_000
_NESTED = 3
_CANDIDATES = 48
TENSOR, NUMBER = "tensor", "number"
Read = Callable[[int, int, int], fx.Node]
"""Gives the node at a place, for one that grows from a base by a slope."""
Look = tuple[Any, ...]
"""What a result is like: sizes, strides, dtype, device, whether it needs a gradient."""


@dataclass(slots=True, eq=False)
class Event:
    """An operation that was written down: the function and its flat operands as Python gave them, tensors as places.

    place, size: the first of the places of its nodes, and how many they are. looks: what its tensors are like. fresh:
    their places where it made them, or -1. writes: the operands that it updates in place. key: a number that equal ones
    have in common; -1 for one that is like none.
    """

    func: Any
    kinds: tuple[Any, ...]
    leaves: list[Any]
    place: int = 0
    size: int = 0
    looks: tuple[Look, ...] = ()
    fresh: tuple[int, ...] = ()
    draws: bool = False
    writes: tuple[int, ...] = ()
    key: int = -1

    def at(self, places: Iterable[int]) -> tuple[int, ...]:
        """The operands that are these places."""
        tensors = [at for at, kind in enumerate(self.kinds) if kind is TENSOR]
        found = [next((at for at in tensors if self.leaves[at] == place), -1) for place in places]
        return tuple(at for at in found if at >= 0)


def flat(value: Any, kinds: list[Any], leaves: list[Any]) -> None:
    """Append the kinds and the leaves of an operand."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        kinds.append(TENSOR)
        leaves.append(value)
    elif kind is int or kind is float:
        kinds.append((NUMBER, kind))
        leaves.append(value)
    elif kind is tuple or kind is list or kind is torch.Size:
        kinds.append((kind, len(value)))
        leaves.append(None)
        for each in value:
            flat(each, kinds, leaves)
    elif kind is dict:
        kinds.append((kind, *value))
        leaves.append(None)
        for each in value.values():
            flat(each, kinds, leaves)
    elif kind is slice:
        kinds.append(kind)
        leaves.append(None)
        for each in (value.start, value.stop, value.step):
            flat(each, kinds, leaves)
    else:
        kinds.append(kind)
        leaves.append(value)


def look_of(value: Tensor) -> Look:
    """What a tensor is like."""
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad


_OBJECTS = (bool, str, type(None), type(...), complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(slots=True, eq=False)
class _Line:
    """One node of a run: its flat operands at the last run that was written, nodes as places, and how they grow.

    moved: by how many entries what it gives lies further in its memory at each run; None for memory of each run's own.
    """

    node: fx.Node
    leaves: list[Any]
    slopes: list[int]
    moved: list[int | None]


@dataclass(slots=True, eq=False)
class Loop:
    """Runs that repeat: the ``events`` of the last one that was written, by how much their operands grow from run to
    run (``slopes``), and the ``lines`` of all its nodes; ``writes``: those that write one row of a tensor from outside.

    start: the first place that was compared. end: that behind the runs that were written. size: places of a run. run,
    at: the run and event that come next; the first run that is not written is number 1. skipped: how many runs are no
    nodes, once it has ended. kept: how many nodes stand behind these. mark, behind: what stands in their place, and
    where the first run behind them ends.
    """

    events: list[Event]
    slopes: list[list[int]]
    lines: list[_Line]
    writes: list[int]
    start: int
    end: int
    size: int
    run: int = 1
    at: int = 0
    skipped: int = 0
    kept: int = 0
    mark: fx.Node | None = None
    behind: fx.Node | None = None

    def holds(self, place: int) -> bool:
        """Whether a place is one of a run that is no node."""
        return self.end <= place < self.end + self.skipped * self.size


class Repeats:
    """The places of all nodes of a record, and the loop that is open, if one is."""

    def __init__(self, graph: fx.Graph, fakes: Fakes, *, folds: bool) -> None:
        self.graph, self.fakes, self.folds = graph, fakes, folds
        self.count = 0
        self.placed, self.places = dict[int, fx.Node](), dict[fx.Node, int]()
        self.loop: Loop | None = None
        self.loops = list[Loop]()
        self.copied: Callable[[fx.Node, fx.Node], None] = lambda like, made: None
        self._keys, self._alike = dict[Any, int](), Counter[tuple[int, ...]]()
        self._forget()

    def _forget(self) -> None:
        self.events, self.keys = list[Event](), list[int]()
        self.last = defaultdict[int, list[int]](list)
        self.wait = 0

    @property
    def nested(self) -> bool:
        """Whether loops were like one another, as those in the step of a loop are: all of these have to be seen."""
        return max(self._alike.values(), default=0) >= _NESTED

    def place(self, node: fx.Node) -> int:
        """The place of a node, the next one where it has none."""
        found = self.places.get(node)
        if found is None:
            found = self.places[node] = self.count
            self.placed[found] = node
            self.count += 1
        return found

    def node(self, place: int) -> fx.Node:
        """The node at a place; a row of its loop where there is none."""
        found = self.placed.get(place)
        return self._row(place) if found is None else found

    def barrier(self) -> None:
        """Something was recorded that is no event: what was before it repeats no more."""
        if self.folds and self.events:
            self._forget()

    # What is written down

    def note(self, event: Event) -> None:
        """An event that was written down. Opens a loop where it ends some equal runs."""
        if not self.folds:
            return
        if event.key < 0:
            self._forget()
            return
        number = len(self.keys)
        self.events.append(event)
        self.keys.append(event.key)
        before = self.last[event.key]
        if number >= self.wait:
            for other in reversed(before[-_CANDIDATES:]):
                period = number - other
                if self._repeats(period) and not self._splits(period):
                    if (loop := self._opened(period)) is not None:
                        self.loop = loop
                        break
                    self.wait = number + period
                    break
        before.append(number)

    def key(self, event: Event, node: fx.Node, looks: tuple[Look, ...]) -> int:
        """The number of events like one, whose numbers may be others; -1 where an operand cannot be compared."""
        objects = list[Any]()
        for kind, leaf in zip(event.kinds, event.leaves, strict=True):
            if kind is TENSOR or kind == (NUMBER, int):
                if kind is TENSOR and leaf < 0:
                    return -1
            elif type(leaf) is float or type(leaf) in _OBJECTS:
                objects.append((type(leaf), leaf))
            else:
                return -1
        fresh = tuple(place >= 0 for place in event.fresh)
        parts = (event.func, event.kinds, tuple(objects), looks, fresh, event.size, event.writes)
        return self._keys.setdefault((*parts, id(node.target)), len(self._keys))

    def _repeats(self, period: int) -> bool:
        keys, back = self.keys, RECORDED * period
        if period > LONGEST or len(keys) < back or keys[-2:] != keys[-2 - period : -period]:
            return False
        return keys[-back + period :] == keys[-back:-period]

    def _splits(self, period: int) -> bool:
        """Whether the last run begins between what makes a value and what updates it."""
        run, before = self.events[-period:], self.events[-2 * period : -period]
        updated = ((a.leaves[at], b.leaves[at]) for a, b in zip(before, run, strict=True) for at in b.writes)
        return any(one != other < run[0].place for one, other in updated)

    def _opened(self, period: int) -> Loop | None:
        """The loop of the last runs; None where their operands or numbers do not grow evenly."""
        count = len(self.events)
        runs = [self.events[count - period * n : count - period * (n - 1)] for n in range(COMPARED, 0, -1)]
        starts = [run[0].place for run in runs]
        size, start = starts[1] - starts[0], starts[0]
        stops = [run[-1].place + run[-1].size for run in runs]
        if [stop - first for first, stop in zip(starts, stops, strict=True)] != [size] * COMPARED or (
            stops[:-1] != starts[1:] or sum(each.size for each in runs[-1]) != size or stops[-1] != self.count
        ):
            return None
        slopes = list[list[int]]()
        for alike in zip(*runs, strict=True):
            columns = zip(*(event.leaves for event in alike), strict=True)
            grows = [self._slope(*each, start, size) for each in zip(alike[0].kinds, columns, strict=True)]
            if None in grows or any(each.place != alike[0].place + size * n for n, each in enumerate(alike)):
                return None
            slopes.append(grows)  # type: ignore[arg-type]
        lines = self._lines(starts, size)
        rows = None if lines is None else _row_writes(lines)
        if lines is None or rows is None:
            return None
        return Loop(runs[-1], slopes, lines, rows, start, stops[-1], size)

    def _slope(self, kind: Any, values: Sequence[Any], start: int, size: int) -> int | None:
        """By how much an operand grows from run to run; None where it does not do so evenly."""
        first, second, *_ = values
        if kind != TENSOR and kind != (NUMBER, int):
            return 0 if all(same(first, each) for each in values) else None
        slope: int = second - first
        if any(later - before != slope for before, later in pairwise(values)):
            return None
        if kind == TENSOR and slope not in (0, size):
            inside = values[-1] >= start or self.node(values[-1]).op == "placeholder"
            return None if inside else slope
        return slope

    def _lines(self, starts: Sequence[int], size: int) -> list[_Line] | None:
        """The nodes of a run with their operands; None where these do not grow evenly."""
        found = list[_Line]()
        for at in range(size):
            nodes = [self.placed[first + at] for first in starts]
            every = [[self.places[x] if isinstance(x, fx.Node) else x for x in flatten(node)] for node in nodes]
            if len({(node.op, node.target, len(leaves)) for node, leaves in zip(nodes, every, strict=True)}) > 1:
                return None
            slopes = list[int]()
            for leaves in zip(*every, strict=True):
                whole = all(type(each) is int for each in leaves)
                slope = leaves[-1] - leaves[-2] if whole else 0
                grown = (leaves[-1] + slope * (n - COMPARED + 1) if whole else leaves[-1] for n in range(COMPARED))
                if not all(map(same, leaves, grown)):
                    return None
                slopes.append(slope)
            found.append(_Line(nodes[-1], every[-1], slopes, _moved(nodes[-2], nodes[-1])))
        return found

    # What is written behind a loop

    def end(self) -> None:
        """End the open loop: the last runs become nodes, and what was seen of the one that has begun."""
        loop, self.loop = self.loop, None
        if loop is None:
            return
        runs = loop.run - 1
        loop.skipped = 0 if self.nested else max((runs - KEPT) // WHOLE * WHOLE, 0)
        if loop.skipped:
            self._alike[tuple(sorted(event.key for event in loop.events))] += 1
            self.loops.append(loop)
            number = len(self.loops)
            loop.mark = self.graph.call_function(skipped_runs, (loop.skipped, number))
            for place in range(loop.end - RECORDED * loop.size, loop.end):
                self.placed[place].meta[SIDE] = number, False
            self._write_rows(loop)
        for run in range(loop.skipped + 1, runs + 1):
            self._write(loop, run, len(loop.lines))
            if loop.skipped and run == loop.skipped + 1:
                loop.behind = self.graph.call_function(run_ended, ())
        begun = sum(event.size for event in loop.events[: loop.at])
        self._write(loop, runs + 1, begun)
        if loop.skipped:
            self._forget()
        else:
            self._remember(loop, runs)

    def _remember(self, loop: Loop, runs: int) -> None:
        """Events that have become nodes count again, as a loop around them may repeat."""
        for run in range(1, runs + 2):
            begun = loop.at if run > runs else len(loop.events)
            for event, slopes in zip(loop.events[:begun], loop.slopes, strict=False):
                further = run * loop.size
                grown = [x + slope * run if slope else x for x, slope in zip(event.leaves, slopes, strict=True)]
                fresh = tuple(place + further if place >= 0 else -1 for place in event.fresh)
                self.last[event.key].append(len(self.keys))
                self.keys.append(event.key)
                self.events.append(replace(event, leaves=grown, place=event.place + further, fresh=fresh))

    # Nodes of runs

    def _write(self, loop: Loop, run: int, count: int) -> None:
        """Write the first ``count`` nodes of a run at the end of the graph."""
        for at, line in enumerate(loop.lines[:count]):
            place = loop.end + (run - 1) * loop.size + at
            made = self.placed[place] = self._copy(line, run, self._read_around(loop))
            self.places[made] = place
            if loop.mark is not None:
                made.meta[SIDE] = loop.mark.args[1], True
        loop.kept += count

    def _write_rows(self, loop: Loop) -> None:
        """Write the nodes of skipped runs that write rows of a tensor from outside: that is one stack in the end."""
        assert loop.mark is not None
        with self.graph.inserting_before(loop.mark):
            for run in range(1, loop.skipped + 1) if loop.writes else ():
                for at in loop.writes:
                    place = loop.end + (run - 1) * loop.size + at
                    made = self.placed[place] = self._copy(loop.lines[at], run, self._read)
                    self.places[made] = place

    def rows(self) -> Iterator[fx.Node]:
        """The nodes that stand for values of runs that are none."""
        return (node for node in self.graph.find_nodes(op="call_function", target=row_of_run))

    def _read_around(self, loop: Loop) -> Read:
        """Reads a place as the runs behind a mark do: there the runs before them are the last that were written, as
        far back as these go."""
        first, written = loop.end + loop.skipped * loop.size, loop.end - RECORDED * loop.size

        def read(base: int, slope: int, place: int) -> fx.Node:
            own = slope == loop.size and base >= written and place < first
            return self.node(place - loop.skipped * loop.size if own else place)

        return read

    def _read(self, base: int, slope: int, place: int) -> fx.Node:
        return self.node(place)

    def _operands(self, line: _Line, run: int, read: Read) -> list[Any]:
        """The flat operands of a line's node, some runs later."""
        grown = ((x, slope, x + slope * run if slope else x) for x, slope in zip(line.leaves, line.slopes, strict=True))
        old = flatten(line.node)
        return [read(*x) if isinstance(before, fx.Node) else x[2] for x, before in zip(grown, old, strict=True)]

    def _copy(self, line: _Line, run: int, read: Read) -> fx.Node:
        """A node like one of the last run that was written, some runs later."""
        like, old = line.node, flatten(line.node)
        leaves = self._operands(line, run, read)
        made = self.graph.create_node(like.op, like.target, *rebuild(like, leaves))
        made.meta = dict(like.meta)
        self.copied(like, made)
        pairs = [(a, b) for a, b in zip(old, leaves, strict=True) if isinstance(a, fx.Node)]
        made.meta["example_value"] = self._example(line, run, pairs)
        return made

    def _example(self, line: _Line, run: int, operands: Sequence[tuple[fx.Node, fx.Node]] = ()) -> Any:
        """An example of a line's node some runs later, in the memory of an operand where it lies there, else in memory
        of its own. ``operands``: those of the line's node, each with the one that is read instead."""
        memory = dict[int, Tensor]()
        for before, now in operands:
            for one, other in zip(_examples(before), _examples(now), strict=True):
                memory[storage_id(one)] = other
        moved = iter(line.moved)

        def again(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                return value
            number, offset = storage_id(value), next(moved)
            if offset is not None:
                memory.setdefault(number, value)
            made = self.fakes.again(value, memory.get(number), int(value.storage_offset()) + (offset or 0) * run)
            memory.setdefault(number, made)
            return made

        return map_aggregate(line.node.meta.get("example_value"), again)

    def _row(self, place: int) -> fx.Node:
        """The node that stands for one at a place that is none."""
        loop = next(each for each in self.loops if each.holds(place))
        runs, at = divmod(place - loop.end, loop.size)
        line = loop.lines[at]
        assert loop.mark is not None
        with self.graph.inserting_before(loop.mark):
            made = self.graph.call_function(row_of_run, (line.node, runs + 1))
        made.meta = dict(line.node.meta)
        made.meta["example_value"] = self._example(line, runs + 1)
        self.placed[place], self.places[made] = made, place
        self.copied(line.node, made)
        return made

    def unfold(self) -> None:
        """Write out all runs."""
        for loop in self.loops:
            assert loop.mark is not None
            with self.graph.inserting_before(loop.mark):
                for run in range(1, loop.skipped + 1):
                    self._write_out(loop, run)
            first = loop.end + loop.skipped * loop.size
            for place in range(first, first + loop.kept):
                line, run = loop.lines[(place - first) % loop.size], (place - loop.end) // loop.size + 1
                made = self.placed[place]
                made.args, made.kwargs = rebuild(made, self._operands(line, run, self._read))
            for mark in (loop.mark, loop.behind):
                if mark is not None:
                    self.graph.erase_node(mark)
        self.loops = []

    def _write_out(self, loop: Loop, run: int) -> None:
        for at, line in enumerate(loop.lines):
            place = loop.end + (run - 1) * loop.size + at
            row = self.placed.get(place)
            made = self.placed[place] = self._copy(line, run, self._read)
            self.places[made] = place
            if row is not None:
                made.meta["example_value"] = row.meta["example_value"]
                row.replace_all_uses_with(made)
                self.graph.erase_node(row)


def _row_writes(lines: Sequence[_Line]) -> list[int] | None:
    """The lines that write one row after another of a tensor from outside, which nobody reads meanwhile; None where
    something else than values of the same run, or all of a tensor from outside, is updated in place."""
    found, written = list[int](), set[int]()
    own = {line.node for line in lines}
    for at, line in enumerate(lines):
        leaves = flatten(line.node)
        moving = any(slope and not isinstance(leaf, fx.Node) for leaf, slope in zip(leaves, line.slopes, strict=True))
        for node in (operand(line.node, place) for place in updated_places(line.node)):
            fixed = not line.slopes[leaves.index(node)]
            if not fixed and (node not in own or any(_lies_outside(each) for each in lines if each.node is node)):
                return None
            if fixed and moving:
                found.append(at)
                written |= {storage_id(each) for each in _examples(node)}
    for at, line in enumerate(lines):
        read = line.node.all_input_nodes if at not in found else _values(line.node)
        if any(storage_id(each) in written for node in read for each in _examples(node)):
            return None
    return found


def _values(write: fx.Node) -> list[fx.Node]:
    """What a node reads but for what it updates."""
    updated = [operand(write, place) for place in updated_places(write)]
    return [node for node in write.all_input_nodes if node not in updated]


def _lies_outside(line: _Line) -> bool:
    """Whether what a node gives lies in one memory in all runs."""
    return any(moved is not None for moved in line.moved)


def _moved(before: fx.Node, node: fx.Node) -> list[int | None]:
    """By how much further what a node gives lies than what that of the run before gives, where it is one memory."""
    found = list[int | None]()
    for one, other in zip(_examples(before), _examples(node), strict=True):
        same = storage_id(one) == storage_id(other)
        found.append(int(other.storage_offset()) - int(one.storage_offset()) if same else None)
    return found


def _examples(node: fx.Node) -> list[Tensor]:
    """The tensors among what a node gives."""
    return [each for each in tensors_of(node.meta.get("example_value")) if each.layout == torch.strided]


def same(one: Any, other: Any) -> bool:
    """Whether operands are the same, as -0.0 and 0.0 are not, nor 1 and 1.0."""
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    return type(one) is not float or math.copysign(1, one) == math.copysign(1, other)
