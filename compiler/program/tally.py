"""What a legal training program costs: units held and moved, steps run.

Counting conventions: the running carry and gradients are not counted. Locally count the saved carries, the reloaded
carries (each until its own last use) and the tapes; remotely the offloaded blocks. A value is held until its last use,
and while an instruction runs its operands and its result are both held. A part is counted once and holds the carry that
it is given itself, until its own last use of it, if nobody needs it afterwards.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from reroll.program.program import Node, Program, advance, offload, recompute, reload, reverse, save, tape

Load = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Units (or bytes) of what is held.

    ``carry`` of one carry, ``tape_step`` of one taped step. ``packed(codec)`` overrides the first by the codec names
    of the instruction (a reloaded carry stays packed until it is read), ``taped(start, stop)`` the second for a tape.
    """

    carry: int = 1
    tape_step: int = 1
    packed: Callable[[tuple[str, ...]], int] | None = None
    taped: Callable[[int, int], int] | None = None

    def of_carry(self, codec: tuple[str, ...] = ()) -> int:
        """Units of one carry kept under ``codec``."""
        return self.carry if self.packed is None else self.packed(codec)

    def of_tape(self, start: int, stop: int) -> int:
        """Units of the tape of steps [start, stop)."""
        return (stop - start) * self.tape_step if self.taped is None else self.taped(start, stop)


@dataclass(frozen=True, slots=True)
class Tally:
    """Costs of one program. Peaks are in the units of ``Sizes``; writes and reads are transfers.

    ``remote_peak`` is that of all remote tiers together, ``tier_peaks`` of each; ``peak_nodes`` names the node at which
    each tier ("local" too) first reaches its peak. ``forward_steps`` are all steps run forward, ``reforward_steps``
    those among them that had run before. ``timeline`` pairs every node with the local units held while it runs;
    ``given`` has for each ``reverse``, by name, the units of the carry that the part itself holds, ``parts`` the parts
    by name and such units.
    """

    local_peak: int
    remote_peak: int
    tier_peaks: Mapping[str, int]
    peak_nodes: Mapping[str, str]
    forward_steps: int
    reforward_steps: int
    remote_writes: int
    remote_reads: int
    carries_written: int
    carries_read: int
    timeline: tuple[tuple[str, int], ...] = field(repr=False)
    given: Mapping[str, int] = field(repr=False, default_factory=dict)
    parts: Mapping[tuple[str, int], PartTally] = field(repr=False, default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartTally:
    """A part by itself: the peak, the timeline and ``given`` as in ``Tally``."""

    local_peak: int
    timeline: tuple[tuple[str, int], ...]
    given: Mapping[str, int]


def _last_uses(graph: fx.Graph) -> tuple[dict[Node, int], dict[tuple[Node, int], int]]:
    """The index at which each node is read last (its own if never); the same for each carry of a reloaded block."""
    last: dict[Node, int] = {}
    for index, node in enumerate(graph.nodes):
        last[node] = index
        for operand in node.all_input_nodes:
            last[operand] = index
    items: dict[tuple[Node, int], int] = {}
    for node in graph.nodes:
        if node.target is operator.getitem:
            item = cast(tuple[Node, int], node.args)
            items[item] = max(items.get(item, 0), last[node])
    return last, items


def _codec(node: Node) -> tuple[str, ...]:
    return tuple(cast(tuple[str, ...], node.kwargs.get("codec", ())))


def _loads(graph: fx.Graph, sizes: Sizes, given: int) -> Iterator[list[Load]]:
    """For each node the (tier, units, index of the last use) of what it begins to hold; ``given``: units of the carry
    that the graph was given, its first placeholder."""
    last, items = _last_uses(graph)
    for index, node in enumerate(graph.nodes):
        args = cast(tuple[Any, ...], node.args)
        if node.target is tape:
            yield [("local", sizes.of_tape(args[1], args[2]), last[node])]
        elif node.target is save:
            yield [("local", sizes.of_carry(_codec(node)), last[node])]
        elif node.target is offload:
            yield [(args[1], len(args[0]) * sizes.of_carry(_codec(node)), last[node])]
        elif node.target is reload:
            block = range(len(args[0].args[0]))
            units = sizes.of_carry(_codec(args[0]))
            yield [("local", units, items.get((node, i), index)) for i in block]
        else:
            yield [("local", given, last[node])] if index == 0 and given else []


@dataclass(slots=True)
class _Count:
    """Counts a graph, and first the parts that it plays: each once for each number of units that it is given."""

    program: Program
    sizes: Sizes
    parts: dict[tuple[str, int], PartTally] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peaks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    where: dict[str, str] = field(default_factory=dict)
    timeline: list[tuple[str, int]] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)

    def walk(self, graph: fx.Graph, given: int = 0) -> None:
        """The peak of each tier and of all remote ones ("remote"), the nodes where they are reached, the timeline."""
        freed: dict[int, list[Load]] = defaultdict(list)
        for index, (node, loads) in enumerate(zip(graph.nodes, _loads(graph, self.sizes, given), strict=True)):
            for load in loads:
                self._hold(node, load)
                freed[load[2]].append(load)
            dead = freed.pop(index, [])
            units = self.held["local"] if node.target is not reverse else self._play(node, dead)
            self._reach(node, "local", units)
            self.timeline.append((node.name, units))
            for tier, nbytes, _ in dead:
                self.held[tier] -= nbytes
                self.held["remote"] -= 0 if tier == "local" else nbytes

    def _hold(self, node: Node, load: Load) -> None:
        tier, units, _ = load
        for each in (tier,) if tier == "local" else (tier, "remote"):
            self.held[each] += units
            self._reach(node, each, self.held[each])

    def _reach(self, node: Node, tier: str, units: int) -> None:
        if units > self.peaks[tier]:
            self.peaks[tier], self.where[tier] = units, node.name

    def _play(self, node: Node, dead: list[Load]) -> int:
        """Units held while a part runs; what dies with the instruction is the carry that it gives to the part."""
        name, given = cast(str, node.args[2]), sum(units for _, units, _ in dead)
        self.given[node.name] = given
        if (name, given) not in self.parts:
            inner = _Count(self.program, self.sizes, self.parts)
            inner.walk(self.program.parts[name].graph, given)
            self.parts[name, given] = PartTally(inner.peaks["local"], tuple(inner.timeline), inner.given)
        return self.held["local"] - given + self.parts[name, given].local_peak


def _steps(program: Program) -> int:
    """All steps that are run forward."""
    inside: dict[str, int] = {}

    def of(graph: fx.Graph) -> int:
        total = 0
        for node in graph.nodes:
            args = cast(tuple[Any, ...], node.args)
            if node.target in (advance, recompute, tape):
                total += args[2] - args[1]
            elif node.target is reverse:
                total += inside[args[2]]
        return total

    for name, part in program.parts.items():
        inside[name] = of(part.graph)
    return of(program.graph)


def count(program: Program, sizes: Sizes) -> Tally:
    """The costs of a program that was found legal."""
    counted = _Count(program, sizes)
    counted.walk(program.graph)
    writes = [len(cast(Any, node.args[0])) for node in program.graph.nodes if node.target is offload]
    blocks = [cast(Any, node.args[0]).args[0] for node in program.graph.nodes if node.target is reload]
    forward = _steps(program)
    local, total = counted.peaks.pop("local", 0), counted.peaks.pop("remote", 0)
    return Tally(
        local_peak=local,
        remote_peak=total,
        tier_peaks=dict(counted.peaks),
        peak_nodes=counted.where,
        forward_steps=forward,
        reforward_steps=forward - program.steps,
        remote_writes=len(writes),
        remote_reads=len(blocks),
        carries_written=sum(writes),
        carries_read=sum(map(len, blocks)),
        timeline=tuple(counted.timeline),
        given=counted.given,
        parts=counted.parts,
    )
