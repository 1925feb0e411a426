"""What a legal training program costs: units held and moved, steps run.

Counting conventions: the running carry and gradients are not counted. Locally count the saved carries, the reloaded
carries (each until its own last use) and the tapes; remotely the offloaded blocks. A value is held until its last use,
and while an instruction runs its operands and its result are both held.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from reroll.program import Node, Program, advance, offload, recompute, reload, save, tape

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
    those among them that had run before. ``timeline`` pairs every node with the local units held while it runs.
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


def _last_uses(program: Program) -> tuple[dict[Node, int], dict[tuple[Node, int], int]]:
    """The index at which each node is read last (its own if never); the same for each carry of a reloaded block."""
    last: dict[Node, int] = {}
    for index, node in enumerate(program.graph.nodes):
        last[node] = index
        for operand in node.all_input_nodes:
            last[operand] = index
    items: dict[tuple[Node, int], int] = {}
    for node in program.graph.nodes:
        if node.target is operator.getitem:
            item = cast(tuple[Node, int], node.args)
            items[item] = max(items.get(item, 0), last[node])
    return last, items


def _codec(node: Node) -> tuple[str, ...]:
    return tuple(cast(tuple[str, ...], node.kwargs.get("codec", ())))


def _loads(program: Program, sizes: Sizes) -> Iterator[list[Load]]:
    """For each node the (tier, units, index of the last use) of what it begins to hold."""
    last, items = _last_uses(program)
    for index, node in enumerate(program.graph.nodes):
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
            yield []


def _peaks(program: Program, sizes: Sizes) -> tuple[dict[str, int], dict[str, str], list[tuple[str, int]]]:
    """The peak of each tier and of all remote ones ("remote"), the nodes where they are reached, the local timeline."""
    held: dict[str, int] = defaultdict(int)
    peaks: dict[str, int] = defaultdict(int)
    where: dict[str, str] = {}
    timeline: list[tuple[str, int]] = []
    freed: dict[int, list[Load]] = defaultdict(list)
    for index, (node, loads) in enumerate(zip(program.graph.nodes, _loads(program, sizes), strict=True)):
        for load in loads:
            tier, units, until = load
            for each in (tier,) if tier == "local" else (tier, "remote"):
                held[each] += units
                if held[each] > peaks[each]:
                    peaks[each], where[each] = held[each], node.name
            freed[until].append(load)
        timeline.append((node.name, held["local"]))
        for tier, units, _ in freed.pop(index, ()):
            held[tier] -= units
            held["remote"] -= 0 if tier == "local" else units
    return peaks, where, timeline


def count(program: Program, sizes: Sizes) -> Tally:
    """The costs of a program that was found legal."""
    peaks, where, timeline = _peaks(program, sizes)
    forward = writes = reads = written = read = 0
    for node in program.graph.nodes:
        args = cast(tuple[Any, ...], node.args)
        if node.target in (advance, recompute, tape):
            forward += args[2] - args[1]
        elif node.target is offload:
            writes, written = writes + 1, written + len(args[0])
        elif node.target is reload:
            reads, read = reads + 1, read + len(args[0].args[0])
    local, total = peaks.pop("local", 0), peaks.pop("remote", 0)
    return Tally(
        local_peak=local,
        remote_peak=total,
        tier_peaks=dict(peaks),
        peak_nodes=where,
        forward_steps=forward,
        reforward_steps=forward - program.steps,
        remote_writes=writes,
        remote_reads=reads,
        carries_written=written,
        carries_read=read,
        timeline=tuple(timeline),
    )
