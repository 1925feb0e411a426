"""Bytes of a training program: what it holds at its peak, and what every tier holds at each instruction.

    peak = max over nodes of  held(node) + register + gradients of the carry + scratch(node) + staged blocks

``held`` is the count of carries and tapes (``reroll.program.tally``); the rest is what an instruction needs besides
(``_besides``), where the scratch of a run or a backward is the walk of its graph (``reroll.graph.memory``). Not counted
are operands that exist before the recurrence runs, the gradients that are added up for them, and what the graph around
holds. The number is an upper bound where memory is shared: a kept carry of which the tape holds a tensor too, a staged
block that was written long ago.

``predict`` says so of a program as it was counted, with its parts; ``memory`` of one that is spelled out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import add, attrgetter

from reroll.program.spelled import RUN_KINDS, Played
from reroll.program.tally import Counted, Hold, Sizes, Tally, is_whole, occupancy
from reroll.schedules.machine import pieces

Work = Callable[[str, int, bool, bool, bool], int]

_REVERSALS = ("backward", "reverse")


@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Bytes of one segment. ``saved`` by its tape; ``fresh`` and ``kept`` the most that a forward run holds, its saved
    values included, from a carry of its own and from one that is kept elsewhere; ``reverse`` the same of a backward
    run, whose gradients of the outputs are not included. ``joined``: what a tape holds of its first carry where the
    tape of the segment before holds that as its own; neither ``saved`` nor ``reverse`` counts it."""

    saved: int
    fresh: int
    kept: int
    reverse: int
    joined: int = 0
    adding: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """Local bytes at an instruction: ``held`` are carries and tapes, the rest is ``scratch``."""

    nbytes: int
    node: str
    held: int

    @property
    def scratch(self) -> int:
        """Bytes besides kept carries and tapes."""
        return self.nbytes - self.held


@dataclass(frozen=True, slots=True)
class Prediction:
    """Local bytes of one recurrence.

    ``forward`` and ``backward`` are the peaks of the two halves, ``turned`` is what stays between them. ``timeline``
    pairs every node with its bytes.
    """

    forward: Peak
    backward: Peak
    turned: int
    timeline: tuple[tuple[str, int], ...] = field(repr=False)

    @property
    def most(self) -> Peak:
        """The larger of the two peaks."""
        return max(self.forward, self.backward, key=attrgetter("nbytes"))

    @property
    def peak(self) -> int:
        """Bytes of the larger of the two peaks."""
        return self.most.nbytes


@dataclass(frozen=True, slots=True)
class OuterMemory:
    """Local bytes that the graph around a recurrence holds: while it runs, between its forward and its backward, and
    while it is reversed.
    ``unasked``: bytes of those gradients of last carries that it does not give, as nobody reads these. ``added``: bytes
    of the gradients that the recurrence adds up, where ``reversing`` has them: they are made by its first reversal."""

    running: int = 0
    turned: int = 0
    reversing: int = 0
    unasked: int = 0
    added: int = 0

    def at_peak(self, prediction: Prediction) -> tuple[Peak, int]:
        """Where a recurrence and what is around it hold most together: the peak of the recurrence, the bytes around."""
        turn = Peak(prediction.turned, "turn", prediction.turned)
        pairs = (prediction.forward, self.running), (turn, self.turned), (prediction.backward, self.reversing)
        return max(pairs, key=lambda pair: pair[0].nbytes + pair[1])

    def beside(self, prediction: Prediction) -> int:
        """The bytes around a recurrence where that alone needs most."""
        return self.running if prediction.most is prediction.forward else self.reversing

    def needed(self, prediction: Prediction) -> int:
        """The most bytes that a recurrence and what is around it hold together."""
        peak, around = self.at_peak(prediction)
        return peak.nbytes + around


@dataclass(frozen=True, slots=True)
class Needs:
    """What instructions need besides what is held: segments by length, the bytes of a carry and of its gradients, the
    bytes of the gradients of the stacked outputs, and how many blocks may wait in local memory to be written. ``thin``:
    segments of which thin tapes are kept, if they have such. ``unasked``: bytes of the gradients of last carries that
    nobody gives: zeros, which only the first segment that is reversed is given. ``added``: bytes that count as held
    around, and are not there before that segment adds to them."""

    segments: Mapping[int, SegmentBytes]
    sizes: Sizes
    carry: int
    grads: int
    output_grads: int = 0
    staged: int = 0
    thin: Mapping[int, SegmentBytes] = field(default_factory=dict)
    unasked: int = 0
    added: int = 0

    def within(self, around: OuterMemory) -> Needs:
        """The same of a recurrence in a graph that holds so much around it."""
        return replace(self, unasked=around.unasked, added=around.added)

    def of(self, length: int, thin: bool) -> SegmentBytes:
        """The bytes of a segment of a length whose tape is whole, or thin."""
        return self.thin[length] if thin else self.segments[length]

    def joined(self, thin: bool) -> int:
        """Bytes of its first carry that a tape holds once with the one before it."""
        return self.of(max(self.segments), thin).joined

    @property
    def handed(self) -> int:
        """The bytes of the gradients that are there from the turn on."""
        return self.grads + self.output_grads

    @property
    def scratch(self) -> int:
        """The most bytes that taping, or reversing, whole segments takes besides carries and tapes that are held."""
        return self.scratch_of(thin=False)

    def scratch_of(self, *, thin: bool) -> int:
        """The same, with thin tapes or whole ones."""
        lengths = [self.of(length, thin) for length in self.segments]
        running = max(each.fresh - each.saved for each in lengths)
        reversing = max(each.reverse - each.saved + each.joined for each in lengths)
        return max(running, reversing, self.carry) + self.handed + self.grads  # that came in, and that are handed on

    def reversing(self, length: int) -> int:
        """Bytes that the backward of a segment of a length takes besides carries and tapes that are held."""
        each = self.segments[length]
        return each.reverse - each.saved + self.handed


NOTHING = OuterMemory()


def predict(tally: Tally, needs: Needs) -> Prediction:
    """The local peak of a legal program of which ``tally`` is the count in bytes."""
    played, local = tally.whole.played, tally.whole.units["local"]
    totals = _Predicted(tally, needs, _working(needs)).totals(tally.whole)
    turn = next(number for number, each in enumerate(played) if each.kind == "turn")

    def highest(numbers: range) -> Peak:
        at = max(numbers, key=totals.__getitem__)
        return Peak(totals[at], played[at].name, local[at])

    return Prediction(
        forward=highest(range(turn)),
        backward=highest(range(turn, len(totals))),
        turned=totals[turn] - needs.carry - needs.handed,
        timeline=tuple((each.name, total) for each, total in zip(played, totals, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Local bytes of the graphs of a counted program; those of parts once for each number of bytes that they hold of
    their carry: ``besides`` is what a part needs besides what it holds at its own peak."""

    tally: Tally
    needs: Needs
    work: Work
    besides: dict[tuple[str, int, bool], int] = field(default_factory=dict)

    def totals(self, counted: Counted, first: bool = True) -> list[int]:
        """The local bytes while each instruction of a graph runs; ``first``: nothing was reversed before it."""
        played = counted.played
        begin = next((number for number, each in enumerate(played) if each.kind in _REVERSALS), None)
        given = counted.given.items()
        inside = {at: self._part(played[at].part, own, first and at == begin) for at, own in given}
        return list(map(add, counted.units["local"], _besides(played, self.needs, self.work, inside, first)))

    def _part(self, name: str, given: int, first: bool) -> int:
        if (name, given, first) not in self.besides:
            counted = self.tally.parts[name, given]
            self.besides[name, given, first] = max(self.totals(counted, first)) - counted.peak
        return self.besides[name, given, first]


def memory(played: Sequence[Played], holding: Sequence[Hold], needs: Needs) -> Mapping[str, tuple[int, ...]]:
    """The bytes of each tier, "local" first, while each instruction of a program that is spelled out runs."""
    units = {tier: tuple(each) for tier, each in occupancy(len(played), holding).items()}
    besides = _besides(played, needs, _working(needs), {})
    return {**units, "local": tuple(map(add, units["local"], besides))}


def _besides(
    played: Sequence[Played], needs: Needs, work: Work, inside: Mapping[int, int], first: bool = True
) -> Iterator[int]:
    """Local bytes that each instruction needs besides what is held: blocks that wait to be written, the gradients that
    are handed on, and what it works with; a ``reverse`` what its part needs, ``inside`` by its number.

    As many blocks as are ``staged`` wait, until others push them out. A reload waits for all writes, as the backward
    half does before it starts. While a tape is reversed the forward register is empty, unless somebody goes on from the
    carry that was made last. The gradients that came in at the turn stay until the end; what the ``first`` reversal
    hands on, and each one after it, is held beside them.
    """
    staged, handed, register = deque[int](maxlen=needs.staged), 0, needs.carry
    read = {source for each in played if each.kind != "backward" for source in each.reads}
    for number, (each, joined) in enumerate(zip(played, _first_carries(played, needs), strict=True)):
        if each.kind == "offload":
            staged.append(len(each.reads) * needs.sizes.of_carry(each.codec))
        elif each.kind == "reload":
            staged.clear()
        elif each.kind == "turn":
            handed = needs.handed
        if each.kind in RUN_KINDS:
            register = needs.carry if number in read else 0
        if each.kind == "reverse":
            own = inside[number]
        else:
            owned = each.kind in RUN_KINDS and played[each.reads[0]].kind in RUN_KINDS
            own = work(each.kind, each.stop - each.start, owned, each.thin, first)
            own += register if each.kind == "backward" else 0
        yield sum(staged) + joined + handed + own
        if each.kind == "turn":
            staged.clear()
            register = 0
        elif each.kind in _REVERSALS and first:
            handed, first = handed + needs.grads - needs.unasked, False


def _first_carries(played: Sequence[Played], needs: Needs) -> Iterator[int]:
    """Bytes of the first carries of tapes that no tape of their kind goes before, while each instruction runs. That of
    the program is there anyway."""
    alone = dict[int, int]()
    whole = is_whole(played)
    for number, each in enumerate(played):
        if each.kind == "tape" and not (whole and each.reads[0] == 0):
            source = played[each.reads[0]]
            alone[number] = 0 if (source.kind, source.thin) == ("tape", each.thin) else needs.joined(each.thin)
        yield sum(alone.values())
        if each.kind == "backward":
            alone.pop(each.reads[0], None)


def _working(needs: Needs) -> Work:
    """Bytes that an instruction over a number of steps works with, besides what is held and the gradients that were
    there before it; ``owned``: the carry that a run starts from is its own, not kept elsewhere; ``first``: nothing was
    reversed before it."""

    @cache
    def nbytes(kind: str, steps: int, owned: bool, thin: bool, first: bool) -> int:
        if kind not in (*RUN_KINDS, "backward"):
            return needs.carry
        found = [needs.of(length, thin) for length, count in pieces(steps, needs.segments) for _ in range(count)]
        if kind == "backward":
            return _reversing(found, needs.grads, needs.added if first else 0)
        return _running(found, owned, taping=kind == "tape")

    return nbytes


def _running(segments: Sequence[SegmentBytes], owned: bool, taping: bool) -> int:
    """Segments run one after another; their tapes are counted as held. All but the first own their first carry."""
    most = taped = 0
    for each in segments:
        most = max(most, taped + (each.fresh - (each.joined if taping else 0) if owned else each.kept))
        taped += each.saved if taping else 0
        owned = True
    return most - taped


def _reversing(segments: Sequence[SegmentBytes], grads: int, added: int) -> int:
    """Segments are reversed last to first, each giving up its tape; the gradients handed on are held besides. The first
    one makes those that are ``added`` up."""
    most = freed = handed = 0
    for each in reversed(segments):
        own = max(each.reverse - added, each.adding) if added else each.reverse
        most = max(most, own - each.saved - freed + handed)
        freed, handed, added = freed + each.saved, grads, 0
    return most
