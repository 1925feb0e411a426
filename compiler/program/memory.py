"""The local peak of a training program in bytes: what it holds, plus what the running instruction needs besides.

    peak = max over nodes of  held(node) + running carry + gradients of the carry + scratch(node) + staged blocks

``held`` is the verifier's count of carries and tapes; the scratch of a run or a backward is the walk of its graph
(``reroll.graph.memory``). Not counted are operands that exist before the recurrence runs, the gradients that are added up
for them, and what the graph around holds. The number is an upper bound where memory is shared: a kept carry of which
the tape holds a tensor too, a staged block that was written long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from reroll.program.program import Node, Program, backward, offload, pieces, reverse, turn
from reroll.program.spelled import RUNS as RUN_KINDS
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
