"""Bytes of a training program: what it holds at its peak, and what every tier holds at each instruction.

    peak = max over nodes of  held(node) + running carry + gradients of the carry + scratch(node) + staged blocks

``held`` is the verifier's count of carries and tapes; the scratch of a run or a backward is the walk of its graph
(``reroll.graph.memory``). Not counted are operands that exist before the recurrence runs, the gradients that are added
up for them, and what the graph around holds. The number is an upper bound where memory is shared: a kept carry of which
the tape holds a tensor too, a staged block that was written long ago.

``holds`` and ``memory`` say the same of a program that is spelled out (``reroll.program.spelled``), instruction by
instruction; a value is held until its last use, as in ``reroll.program.tally``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np

from reroll.program.program import Node, Program, backward, offload, pieces, reverse, turn
from reroll.program.spelled import RUNS as RUN_KINDS
from reroll.program.spelled import Played
from reroll.program.tally import Sizes, Tally
from reroll.program.writing import RUNS, before_turn


@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Bytes of one segment. ``saved`` by its tape; ``fresh`` and ``kept`` the most that a forward run holds, its saved
    values included, from a carry of its own and from one that is kept elsewhere; ``reverse`` the same of a backward
    run, whose gradients of the outputs are not included."""

    saved: int
    fresh: int
    kept: int
    reverse: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Local bytes of one recurrence. ``peak`` is reached at ``node``: ``held`` there, the rest is ``scratch``.

    ``forward`` and ``backward`` are the peaks of the two halves, ``turned`` is what stays between them. ``timeline``
    pairs every node with its bytes.
    """

    peak: int
    node: str
    held: int
    forward: int
    backward: int
    turned: int
    timeline: tuple[tuple[str, int], ...] = field(repr=False)

    @property
    def scratch(self) -> int:
        """Bytes at the peak besides kept carries and tapes."""
        return self.peak - self.held


@dataclass(frozen=True, slots=True)
class Needs:
    """What instructions need besides what is held: segments by length, the bytes of a carry and of its gradients, the
    bytes of the gradients of the stacked outputs, and how many blocks may wait in local memory to be written."""

    segments: Mapping[int, SegmentBytes]
    sizes: Sizes
    carry: int
    grads: int
    output_grads: int = 0
    staged: int = 0

    @property
    def scratch(self) -> int:
        """The most bytes that taping, or reversing, whole segments takes besides carries and tapes that are held."""
        lengths = self.segments.values()
        running = max(each.fresh - each.saved for each in lengths)
        reversing = self.carry + max(each.reverse - each.saved for each in lengths)
        return max(running, reversing, self.carry) + self.grads + self.output_grads

    def reversing(self, length: int) -> int:
        """Bytes that the backward of a segment of a length takes besides carries and tapes that are held."""
        each = self.segments[length]
        return self.carry + each.reverse - each.saved + self.grads + self.output_grads


def predict(program: Program, tally: Tally, needs: Needs) -> Prediction:
    """The local peak of a legal program of which ``tally`` is the count in bytes."""
    inside = _Inside(program, tally, working(needs))
    forward = set(before_turn(program.graph))
    timeline: list[tuple[str, int]] = []
    peaks = {True: 0, False: 0}
    none = cast(Sequence[int], [0] * needs.staged)
    turned, staged = 0, none  # nothing waits once the backward half begins
    for node, (name, held) in zip(program.graph.nodes, tally.timeline, strict=True):
        early = node in forward
        written = 0
        if node.target is offload:
            written = len(node.args[0]) * needs.sizes.of_carry(tuple(node.kwargs.get("codec", ())))
        staged = waiting(staged, _kind(node), written)
        total = held + sum(staged) + inside.besides(node, tally.given.get(name, 0))
        total += 0 if early else needs.grads + needs.output_grads
        timeline.append((name, total))
        peaks[early] = max(peaks[early], total)
        if node.target is turn:
            turned, staged = held + sum(staged), none
    peak, name = max(((total, name) for name, total in timeline), key=lambda pair: pair[0])
    held = dict(tally.timeline)[name]
    return Prediction(peak, name, held, peaks[True], peaks[False], turned, tuple(timeline))


@dataclass(slots=True)
class _Inside:
    """What the nodes of parts need besides what is held, seen from where the parts are played."""

    program: Program
    tally: Tally
    work: Callable[[str, int, bool], int]
    peaks: dict[tuple[str, int], int] = field(default_factory=dict)

    def besides(self, node: Node, given: int) -> int:
        """Bytes that a node needs besides what is held; a part, which holds ``given`` units of its carry, besides its
        peak."""
        args: Any = node.args
        if node.target is not reverse:
            start, stop = args[1:] if node.target in RUNS else args[0].args[1:] if node.target is backward else (0, 0)
            owned = node.target in RUNS and args[0].target in RUNS
            return self.work(_kind(node), stop - start, owned)
        name = cast(str, args[2])
        return self._peak(name, given) - self.tally.parts[name, given].local_peak

    def _peak(self, name: str, given: int) -> int:
        if (name, given) not in self.peaks:
            counted = self.tally.parts[name, given]
            nodes = zip(self.program.parts[name].graph.nodes, counted.timeline, strict=True)
            self.peaks[name, given] = max(
                held + self.besides(node, counted.given.get(at, 0)) for node, (at, held) in nodes
            )
        return self.peaks[name, given]


def _kind(node: Node) -> str:
    """The name of an instruction, as in ``reroll.program.spelled``."""
    return str(getattr(node.target, "__name__", node.op))


def waiting(staged: Sequence[int], kind: str, nbytes: int) -> Sequence[int]:
    """The bytes of blocks that wait in local memory to be written, the oldest first, after an instruction that writes
    so many bytes, if it writes any. A reload waits for all writes, as the backward half does before it starts."""
    if kind == "offload":
        return [*staged, nbytes][1:]
    return [0] * len(staged) if kind == "reload" else staged


def working(needs: Needs) -> Callable[[str, int, bool], int]:
    """Bytes that an instruction over a number of steps works with, besides what is held and the gradients that were
    there before it; ``owned``: the carry that a run starts from is its own, not kept elsewhere."""

    @cache
    def nbytes(kind: str, steps: int, owned: bool) -> int:
        if kind not in (*RUN_KINDS, "backward"):
            return needs.carry
        lengths = [length for length, count in pieces(steps, needs.segments) for _ in range(count)]
        if kind == "backward":
            return needs.carry + _reversing(lengths, needs)
        return _running(lengths, needs, owned, taping=kind == "tape")

    return nbytes


def _running(lengths: Sequence[int], needs: Needs, owned: bool, taping: bool) -> int:
    """Segments run one after another; their tapes are counted as held. All but the first own their first carry."""
    most = taped = 0
    for length in lengths:
        each = needs.segments[length]
        most = max(most, taped + (each.fresh if owned else each.kept))
        taped += each.saved if taping else 0
        owned = True
    return most - taped


def _reversing(lengths: Sequence[int], needs: Needs) -> int:
    """Segments are reversed last to first, each giving up its tape; the gradients handed on are held besides."""
    most = freed = handed = 0
    for length in reversed(lengths):
        each = needs.segments[length]
        most = max(most, each.reverse - each.saved - freed + handed)
        freed, handed = freed + each.saved, needs.grads
    return most


@dataclass(frozen=True, slots=True)
class Hold:
    """Bytes that a tier holds while the instructions ``first`` to ``last`` run, and the steps of their carries."""

    tier: str
    nbytes: int
    first: int
    last: int
    carries: tuple[int, ...] = ()


def holds(played: Sequence[Played], sizes: Sizes) -> Iterator[Hold]:
    """What is held: tapes, saved carries and blocks until their last use, each reloaded carry until its own."""
    last, items = _last_uses(played)
    steps: list[tuple[int, ...]] = []
    for number, each in enumerate(played):
        steps.append(_carries(each, steps))
        if each.kind == "tape":
            yield Hold("local", sizes.of_tape(each.start, each.stop), number, last[number])
        elif each.kind == "save":
            yield Hold("local", sizes.of_carry(each.codec), number, last[number], steps[number])
        elif each.kind == "offload":
            nbytes = len(each.reads) * sizes.of_carry(each.codec)
            yield Hold(each.tier, nbytes, number, last[number], steps[number])
        elif each.kind == "reload":
            nbytes = sizes.of_carry(played[each.reads[0]].codec)
            for item, step in enumerate(steps[number]):
                yield Hold("local", nbytes, number, items.get((number, item), number), (step,))


def _last_uses(played: Sequence[Played]) -> tuple[list[int], dict[tuple[int, int], int]]:
    """The number at which each value is read last (its own if never); the same for each carry of a reloaded block."""
    last = list(range(len(played)))
    for number, each in enumerate(played):
        for source in each.reads:
            last[source] = number
    items: dict[tuple[int, int], int] = {}
    for number, each in enumerate(played):
        if each.kind == "pick":
            item = (each.reads[0], each.item)
            items[item] = max(items.get(item, 0), last[number])
    return last, items


def _carries(each: Played, steps: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The steps of the carries that an instruction gives."""
    if each.kind in RUN_KINDS:
        return (each.stop,)
    if each.kind in ("backward", "turn", "output"):
        return ()
    read = tuple(step for source in each.reads for step in steps[source])
    return (0,) if each.kind == "carry" else (read[each.item],) if each.kind == "pick" else read


def memory(played: Sequence[Played], held: Sequence[Hold], needs: Needs) -> Mapping[str, tuple[int, ...]]:
    """The bytes of each tier, "local" first, while each instruction runs."""
    tiers = dict.fromkeys(["local", *(hold.tier for hold in held)])
    changes = {tier: np.zeros(len(played) + 1, dtype=np.int64) for tier in tiers}
    for hold in held:
        changes[hold.tier][hold.first] += hold.nbytes
        changes[hold.tier][hold.last + 1] -= hold.nbytes
    nbytes = {tier: np.cumsum(change)[:-1] for tier, change in changes.items()}
    nbytes["local"] += np.fromiter(_besides(played, needs), dtype=np.int64)
    return {tier: tuple(each.tolist()) for tier, each in nbytes.items()}


def _besides(played: Sequence[Played], needs: Needs) -> Iterator[int]:
    """Local bytes that each instruction needs besides what is held: blocks that wait to be written, the gradients that
    are handed on, and what it works with."""
    work, handed = working(needs), 0
    none: Sequence[int] = [0] * needs.staged
    staged = none
    for each in played:
        written = len(each.reads) * needs.sizes.of_carry(each.codec) if each.kind == "offload" else 0
        staged = waiting(staged, each.kind, written)
        if each.kind == "turn":
            handed = needs.grads + needs.output_grads
        owned = each.kind in RUN_KINDS and played[each.reads[0]].kind in RUN_KINDS
        yield sum(staged) + handed + work(each.kind, each.stop - each.start, owned)
        staged = none if each.kind == "turn" else staged
