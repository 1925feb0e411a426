"""The pattern of a model's operations in the number of steps T, and whether a run at some T follows it.

Three recordings at short lengths give the pattern: stretches that are run once, and loops whose number of runs is affine
in T. Every number of every event is then ``a + b r + c T`` at run r of its loop, but for a few first and last runs,
which have numbers of their own. A recording at the full length must be what the pattern predicts, event by event.
Numbers of the user's that are no such function (``1 / T``, ``0.9 ** t``) are *free*: they are read from the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from reroll.detect import repeats
from reroll.errors import LengthError
from reroll.recording import LITERALS, Numbers, markers
from reroll.relations import MIN_STEPS

_EDGE = 4
_FEW = 2
Rows = list[Numbers]


@dataclass(frozen=True, slots=True)
class Affine:
    """``a + b T``, exactly, for lengths at which it is a whole number."""

    a: int | Fraction
    b: int | Fraction

    def __call__(self, length: int) -> int:
        value = self.a + self.b * length
        if value != int(value):
            raise LengthError(f"At {length} steps a loop would be run {value} times.")
        return int(value)

    @classmethod
    def through(cls, lengths: Sequence[int], values: Sequence[Any]) -> Affine | None:
        """The affine function through all points; None if there is none."""
        if not all(type(value) is int for value in values):
            return None
        slope = Fraction(values[-1] - values[0], lengths[-1] - lengths[0])
        start = values[0] - slope * lengths[0]
        fits = all(start + slope * n == value for n, value in zip(lengths, values, strict=True))
        return cls(*(int(x) if x == int(x) else x for x in (start, slope))) if fits else None


@dataclass(frozen=True, slots=True)
class Form:
    """The numbers of an event as a function of run r and length T: ``a + b r + c T`` each; ``free`` ones are not."""

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    c: tuple[Any, ...]
    free: frozenset[int] = frozenset()

    def steady(self, length: int) -> Numbers | None:
        """The numbers at every run, if they do not change from run to run."""
        return None if self.free or any(self.b) else self(0, length)

    def __call__(self, run: int, length: int) -> Numbers:
        return tuple(a + b * run + c * length for a, b, c in zip(self.a, self.b, self.c, strict=True))


@dataclass(frozen=True, slots=True)
class Slot:
    """One event of a stretch: its colour, and its numbers in the first runs, the last ones (last first), the others."""

    colour: int
    kinds: tuple[str, ...]
    head: tuple[Form, ...]
    tail: tuple[Form, ...]
    middle: Form

    def form(self, run: int, count: int) -> tuple[Form, int]:
        """The form that holds at a run of ``count``, and the run to apply it to."""
        if run < len(self.head):
            return self.head[run], 0
        if count - run <= len(self.tail):
            return self.tail[count - run - 1], 0
        return self.middle, run


@dataclass(frozen=True, slots=True)
class Stretch:
    """Events that are run ``count(T)`` times, one after another."""

    slots: tuple[Slot, ...]
    count: Affine


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording at a short length: colours and numbers of all events, and the user's line of each.

    ``given``: the event that made each tensor of the result, by its place in it.
    """

    length: int
    colours: list[int]
    numbers: Rows
    lines: list[str]
    given: dict[tuple[Any, ...], int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """What a model does at every length that it follows.

    ``anchors`` says of tensors of the result, by their place in it, whether the run of the loop that makes them counts
    from the ``first`` or from the ``last``.
    """

    lengths: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    palette: dict[Any, int]
    literals: tuple[Literal, ...]
    anchors: dict[tuple[Any, ...], str]
    changes_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Literal:
    """A number of the user's: where it is, and its values at every run, at each of the pattern's lengths."""

    stretch: int
    slot: int
    column: int
    values: tuple[tuple[int | float, ...], ...]
    line: str


def find_pattern(
    traces: Sequence[Trace], palette: dict[Any, int], free: tuple[str, ...] = (), multiple: int = 1
) -> Pattern:
    """The pattern of three recordings, shortest first. Raises LengthError if there is none.

    free: kinds of the user's numbers that may be no affine function of run and length. multiple: how many repetitions of
    equal operations are one run of a loop, for loops whose numbers have a period.
    """
    names = {number: colour for colour, number in palette.items()}
    lengths = tuple(trace.length for trace in traces)
    layout = list(_layout(np.array(traces[-1].colours, np.int32), 0, multiple))
    parsed = [_parse(trace, traces[-1].colours, layout) for trace in traces]
    stretches, literals = [], []
    for at, (start, period, repeated) in enumerate(layout):
        counts = [starts[at][1] for starts in parsed]
        count = Affine.through(lengths, counts)
        if count is None or (not repeated and counts != [1] * len(traces)):
            raise LengthError(
                f"The loop at {traces[-1].lines[start]} is run {', '.join(map(str, counts))} times at lengths "
                f"{', '.join(map(str, lengths))}, which is no affine function of the length."
            )
        slots = []
        for place in range(period):
            event = start + place
            colour = traces[-1].colours[event]
            kinds = tuple(markers(names[colour]))
            rows = [
                [trace.numbers[starts[at][0] + place + period * r] for r in range(starts[at][1])]
                for trace, starts in zip(traces, parsed, strict=True)
            ]
            head, tail, middle = _forms(lengths, rows, kinds, free, traces[-1].lines[event])
            slots.append(Slot(colour, kinds, head, tail, middle))
            literals += [
                Literal(
                    at, place, column, tuple(tuple(row[column] for row in each) for each in rows), traces[-1].lines[event]
                )
                for column, kind in enumerate(kinds)
                if kind in LITERALS
            ]
        stretches.append(Stretch(tuple(slots), count))
    anchors = dict(_anchors(traces, parsed, [period for _, period, _ in layout]))
    return Pattern(lengths, tuple(stretches), palette, tuple(literals), anchors)


def _anchors(
    traces: Sequence[Trace], parsed: Sequence[list[tuple[int, int]]], periods: list[int]
) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Of each tensor that every run gives at the same place: from where the run of the loop that makes it counts."""
    for place in set.intersection(*(set(trace.given) for trace in traces)):
        first, last = set(), set()
        for trace, stretches in zip(traces, parsed, strict=True):
            event = trace.given[place]
            for at, ((start, count), period) in enumerate(zip(stretches, periods, strict=True)):
                if event is not None and start <= event < start + count * period:
                    run, slot = divmod(event - start, period)
                    first.add((at, slot, run))
                    last.add((at, slot, count - run))
        if len(first) == 1 or len(last) == 1:
            yield place, "first" if len(first) == 1 else "last"


def _layout(colours: Any, offset: int, multiple: int) -> Iterator[tuple[int, int, bool]]:
    """(start, period, whether it repeats) of the stretches of a sequence of colours, in order."""
    runs = repeats(colours)
    if not runs:
        if len(colours):
            yield offset, len(colours), False
        return
    _, period, start, stop = runs[0]
    count = (stop - start) // period
    if count >= MIN_STEPS * multiple:
        period, count = period * multiple, count // multiple
    yield from _layout(colours[:start], offset, multiple)
    yield offset + start, period, True
    rest = start + count * period
    yield from _layout(colours[rest:], offset + rest, multiple)


def _parse(trace: Trace, model: list[int], layout: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """(start, runs) of each stretch in a recording."""
    found, at = [], 0
    for start, period, repeated in layout:
        template, first = model[start : start + period], at
        while trace.colours[at : at + period] == template and (repeated or at == first):
            at += period
        found.append((first, (at - first) // period))
        if not repeated and at == first:
            break
    if at != len(trace.colours):
        line = trace.lines[min(at, len(trace.lines) - 1)]
        raise LengthError(f"What the model does at {trace.length} steps differs from other lengths, at {line}.")
    return found


def _forms(
    lengths: Sequence[int], rows: Sequence[Rows], kinds: Sequence[str], loose: tuple[str, ...], line: str
) -> tuple[tuple[Form, ...], tuple[Form, ...], Form]:
    """The forms of one slot in its first runs, last runs and others, with the fewest runs of their own."""
    least = min(len(each) for each in rows)
    if least == 0 or max(len(each) for each in rows) == least == 1:
        one = _fit(lengths, [each[:1] for each in rows], kinds, loose)
        if one is not None and least:
            return (one,), (), one
    for free in ((), loose):
        for head, tail in _EDGES:
            if least - head - tail < _FEW:
                continue
            middle = _fit(lengths, [each[head : len(each) - tail] for each in rows], kinds, free, head)
            first = [_fit(lengths, [each[r : r + 1] for each in rows], kinds, free) for r in range(head)]
            last = [_fit(lengths, [each[-1 - r :][:1] for each in rows], kinds, free) for r in range(tail)]
            if middle is not None and all(first) and all(last):
                return tuple(f for f in first if f), tuple(f for f in last if f), middle
    raise LengthError(
        f"What {line} reads or is given changes from step to step in a way that short traces do not explain."
    )


def _fit(
    lengths: Sequence[int], rows: Sequence[Rows], kinds: Sequence[str], free: tuple[str, ...], offset: int = 0
) -> Form | None:
    """The form of runs ``offset, offset + 1, ...`` at each length, if there is one; ``free`` kinds of numbers may be."""
    if not all(rows):
        return None
    a, b, c, loose = [], [], [], set()
    for column, kind in enumerate(kinds):
        found = _column(lengths, [[row[column] for row in each] for each in rows], offset)
        if found is None and kind not in free:
            return None
        if found is None:
            loose.add(column)
        base, slope, growth = found or (0, 0, 0)
        a.append(base)
        b.append(slope)
        c.append(growth)
    return Form(tuple(a), tuple(b), tuple(c), frozenset(loose))


def _column(lengths: Sequence[int], values: Sequence[list[Any]], offset: int) -> tuple[Any, Any, Any] | None:
    """(a, b, c) of ``a + b r + c T``; floats only where nothing changes."""
    first = values[0][0]
    if all(value == first for each in values for value in each):
        return first, 0, 0
    if not all(type(value) is int for each in values for value in each):
        return None
    longest = values[-1]
    slope = longest[1] - longest[0] if len(longest) > 1 else 0
    growth = Affine.through(lengths, [each[0] for each in values])
    if growth is None:
        return None
    base = growth.a - slope * offset
    fits = all(
        value == base + slope * (offset + r) + growth.b * n
        for n, each in zip(lengths, values, strict=True)
        for r, value in enumerate(each)
    )
    return (base, slope, growth.b) if fits else None


class Departure(BaseException):
    """Raised inside a model that leaves its pattern; no ``except Exception`` of a model catches it."""


@dataclass
class Check:
    """Follows one run of a model at ``length`` steps, and raises ``Departure`` where it leaves the pattern.

    ``line`` gives the user's line that is running. ``values`` collects the numbers of the user's, by literal.
    """

    pattern: Pattern
    length: int
    line: Callable[[], str]
    values: dict[tuple[int, int, int], list[int | float]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    stretch: int = 0
    run: int = 0
    place: int = 0

    def __post_init__(self) -> None:
        self.counts = [stretch.count(self.length) for stretch in self.pattern.stretches]
        colours = list(self.pattern.palette)
        self.colours = [[colours[slot.colour] for slot in stretch.slots] for stretch in self.pattern.stretches]
        self.steady = [[slot.middle.steady(self.length) for slot in stretch.slots] for stretch in self.pattern.stretches]
        self._skip()

    @property
    def possible(self) -> bool:
        """Whether the pattern has a run of this length: below it, first and last steps would overlap."""
        return min(self.counts, default=0) >= 0

    def _skip(self) -> None:
        while self.stretch < len(self.counts) and self.counts[self.stretch] <= 0:
            self.stretch += 1

    def see(self, colour: tuple[Any, ...], numbers: Numbers) -> None:
        """The next event. Raises Departure if it is not the one that the pattern predicts."""
        if self.stretch == len(self.counts):
            self._depart("has no operation left here")
        place, colours = self.place, self.colours[self.stretch]
        if colour != colours[place]:
            self._depart("has another operation here, or one on other operands")
        slot, count = self.pattern.stretches[self.stretch].slots[place], self.counts[self.stretch]
        if len(slot.head) > self.run or count - self.run <= len(slot.tail) or numbers != self.steady[self.stretch][place]:
            self._compare(numbers, *slot.form(self.run, count))
        self.place += 1
        if self.place == len(colours):
            self.place, self.run = 0, self.run + 1
            if self.run == count:
                self.run, self.stretch = 0, self.stretch + 1
                self._skip()

    def _compare(self, numbers: Numbers, form: Form, run: int) -> None:
        expected = form(run, self.length)
        if numbers != expected and any(
            a != b and column not in form.free for column, (a, b) in enumerate(zip(numbers, expected, strict=True))
        ):
            self._depart("reads another step's value here, or has another number")
        for column in form.free:
            self.values.setdefault((self.stretch, self.place, column), []).append(numbers[column])

    def _depart(self, how: str) -> None:
        lengths = ", ".join(map(str, self.pattern.lengths))
        raise Departure(
            f"At {self.length} steps the model does not go on as at {lengths} steps: what was seen there {how}: {self.line()}."
        )

    def finish(self) -> None:
        """The end of the run. Raises Departure if the pattern goes on."""
        if self.stretch != len(self.counts):
            self._depart("has more operations")

    def literal(self, values: Sequence[tuple[int | float, ...]]) -> list[int | float] | None:
        """The values at this length of the user's number that has these values at the pattern's lengths.

        values: at each length the value at every run, but for a few first and last ones. None if there is no such
        number, or several that now differ.
        """
        found = set()
        for each in self.pattern.literals:
            for cut in _EDGES:
                if all(_cut(own, cut) == wanted for own, wanted in zip(each.values, values, strict=True)):
                    self.asked.add(id(each))
                    found.add(_cut(tuple(self._values(each)), cut))
        return list(found.pop()) if len(found) == 1 else None

    def scalar(self, values: Sequence[int | float]) -> int | float | None:
        """The value at this length of the user's number that has one value at each of the pattern's lengths.

        It may be the same at every run, or that of one of the first or last runs.
        """
        found = set()
        for each in self.pattern.literals:
            for own in _ONES:
                if all(own(runs) == {value} for runs, value in zip(each.values, values, strict=True)):
                    self.asked.add(id(each))
                    found |= own(tuple(self._values(each)))
        return found.pop() if len(found) == 1 else None

    def unasked(self) -> Literal | None:
        """A free number that nobody asked for, if there is one: then it is not known what it does at this length."""
        for each in self.pattern.literals:
            slot = self.pattern.stretches[each.stretch].slots[each.slot]
            free = any(each.column in form.free for form in (*slot.head, *slot.tail, slot.middle))
            if free and id(each) not in self.asked:
                return each
        return None

    def _values(self, literal: Literal) -> Iterator[int | float]:
        slot = self.pattern.stretches[literal.stretch].slots[literal.slot]
        count = self.counts[literal.stretch]
        seen = iter(self.values.get((literal.stretch, literal.slot, literal.column), ()))
        for run in range(count):
            form, at = slot.form(run, count)
            yield next(seen) if literal.column in form.free else form(at, self.length)[literal.column]


_EDGES = sorted(((h, e) for h in range(_EDGE + 1) for e in range(_EDGE + 1)), key=lambda pair: (sum(pair), pair))
_ONES: tuple[Callable[[tuple[Any, ...]], set[Any]], ...] = (
    set,
    *(lambda runs, at=at: set(runs[at : at + 1]) for at in range(_EDGE)),  # type: ignore[misc]
    *(lambda runs, at=at: set(runs[len(runs) - at - 1 :][:1]) for at in range(_EDGE)),  # type: ignore[misc]
)


def _cut(runs: tuple[Any, ...], edges: tuple[int, int]) -> tuple[Any, ...]:
    return runs[edges[0] : len(runs) - edges[1]]
