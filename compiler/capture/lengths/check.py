"""Whether a run of a model at some length follows a pattern, event by event.

A number of Dynamo's graph that depends on the length is one that the model's own run used too. What it is at another
length is read from there (``Literals``), so that any function of the step and the length will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from reroll.capture.lengths.forms import EDGES, Affine, Form
from reroll.capture.lengths.pattern import Literal, Pattern, Slot
from reroll.capture.recorder.events import SIZE, Numbers

_Values = tuple[int | float, ...]
_ONE = 4


class Departure(BaseException):
    """Raised inside a model that leaves its pattern; no ``except Exception`` of a model catches it."""


@dataclass
class Check:
    """Follows one run of a model at ``length`` steps, and raises ``Departure`` where it leaves the pattern.

    ``line`` gives the user's line that is running. ``values`` collects the numbers of the user's, by literal. ``rows``:
    the size that was another one than predicted.
    """

    pattern: Pattern
    length: int
    line: Callable[[], str]
    values: dict[tuple[int, int, int], list[int | float]] = field(default_factory=dict)
    stretch: int = 0
    run: int = 0
    place: int = 0
    departed: str = ""
    rows: int | None = None

    def __post_init__(self) -> None:
        self.counts = [stretch.count(self.length) for stretch in self.pattern.stretches]
        colours = list(self.pattern.palette)
        self.colours = [[colours[slot.colour] for slot in stretch.slots] for stretch in self.pattern.stretches]
        self.steady = [
            [_steady(slot, count, self.length) for slot in stretch.slots]
            for stretch, count in zip(self.pattern.stretches, self.counts, strict=True)
        ]
        self._skip()

    @property
    def possible(self) -> bool:
        """Whether the pattern has a run of this length: below it, first and last steps would overlap."""
        return min(self.counts, default=0) >= 0

    def _skip(self) -> None:
        while self.stretch < len(self.counts) and self.counts[self.stretch] <= 0:
            self.stretch += 1

    def see(self, colour: tuple[Any, ...], numbers: Numbers) -> None:
        """The next event. Raises Departure if it is not the one that the pattern predicts, and ever after."""
        if self.departed:
            raise Departure(self.departed)
        if self.stretch == len(self.counts):
            self._depart("has no operation left here")
        place, colours = self.place, self.colours[self.stretch]
        if colour != colours[place]:
            self._depart("has another operation here, or one on other operands")
        steady, first, last = self.steady[self.stretch][place]
        if numbers != steady or not first <= self.run < last:
            slot = self.pattern.stretches[self.stretch].slots[place]
            self._compare(numbers, slot.kinds, *slot.form(self.run, self.counts[self.stretch]))
        self.place = place + 1
        if self.place == len(colours):
            self.place, self.run = 0, self.run + 1
            if self.run == self.counts[self.stretch]:
                self.run, self.stretch = 0, self.stretch + 1
                self._skip()

    def _compare(self, numbers: Numbers, kinds: Sequence[str], form: Form, run: int) -> None:
        """Raises Departure where numbers are others than predicted: a slice ``[:20]`` takes all of a short sequence."""
        pairs = zip(kinds, numbers, form(run, self.length), strict=True)
        for column, (kind, number, expected) in enumerate(pairs):
            if number == expected or column in form.free:
                continue
            if kind == SIZE:
                self.rows = int(number)
                self._depart(f"reads a value with {number} entries here, which short sequences do not explain")
            self._depart("reads another step's value here, or has another number")
        for column in form.free:
            self.values.setdefault((self.stretch, self.place, column), []).append(numbers[column])

    def _depart(self, how: str) -> None:
        lengths = ", ".join(map(str, self.pattern.lengths))
        self.departed = (
            f"At {self.length} steps the model does not go on as at {lengths} steps: what was seen there {how}: "
            f"{self.line()}."
        )
        raise Departure(self.departed)

    def finish(self) -> None:
        """The end of the run. Raises Departure if the pattern goes on, or was left."""
        if self.departed:
            raise Departure(self.departed)
        if self.stretch != len(self.counts):
            self._depart("has more operations")
        self.colours, self.steady = [], []  # of no use any more; the rest is kept for each length

    def values_of(self, literal: Literal) -> tuple[int | float, ...]:
        """The values of a number of the user's at every run of its loop, once the run is over."""
        slot = self.pattern.stretches[literal.stretch].slots[literal.slot]
        count = self.counts[literal.stretch]
        seen = iter(self.values.get((literal.stretch, literal.slot, literal.column), ()))
        forms = (slot.form(run, count) for run in range(count))
        return tuple(
            next(seen) if literal.column in form.free else form(at, self.length)[literal.column] for form, at in forms
        )


def _steady(slot: Slot, count: int, length: int) -> tuple[Numbers | None, int, int]:
    """(numbers, first run, first run behind) of the runs that are no edges, or None where numbers differ there."""
    form = slot.middle
    steady = None if form.free or any(form.b) else form(0, length)
    return steady, len(slot.head), count - len(slot.tail)


@dataclass
class Literals:
    """The numbers of one run at full length; ``asked`` are those that were looked up."""

    check: Check
    asked: set[int] = field(default_factory=set)

    def sequence(self, values: Sequence[_Values]) -> _Values | None:
        """The values at this length of the number that has these values, step by step, at the pattern's lengths.

        They may leave out a few first and last runs of a loop, or go on before and after it. None if there is no such
        number, or several that now differ.
        """
        found = set()
        for chain in self._chains():
            own = [sum((each.values[at] for each in chain), ()) for at in range(len(values))]
            for cut in EDGES:
                if all(_cut(runs, cut) == wanted for runs, wanted in zip(own, values, strict=True)):
                    self.asked |= {id(each) for each in chain}
                    found.add(_cut(sum((self.check.values_of(each) for each in chain), ()), cut))
        return found.pop() if len(found) == 1 else None

    def scalar(self, values: Sequence[int | float]) -> int | float | None:
        """The value at this length of the number that has one value at each of the pattern's lengths.

        It may be the same at every run, or that of one of the first or last runs.
        """
        found = set()
        for each in self.check.pattern.literals:
            for own in _ONES:
                if all(own(runs) == {value} for runs, value in zip(each.values, values, strict=True)):
                    self.asked.add(id(each))
                    found |= own(self.check.values_of(each))
        return found.pop() if len(found) == 1 else None

    def unasked(self) -> Literal | None:
        """A live free number that nobody asked for, if there is one: what it does at this length is not known."""
        for each in self.check.pattern.literals:
            slot = self.check.pattern.stretches[each.stretch].slots[each.slot]
            free = any(each.column in form.free for form in (*slot.head, *slot.tail, slot.middle))
            if free and each.live and id(each) not in self.asked and not self._as_expected(each):
                return each
        return None

    def _as_expected(self, literal: Literal) -> bool:
        """Whether a whole number that is used once is an affine function of the length, here too."""
        if any(len(each) != 1 or each[0] != each[0] // 1 for each in literal.values):
            return False
        affine = Affine.through(self.check.pattern.lengths, [int(value) for (value,) in literal.values])
        return affine is not None and self.check.values_of(literal) == (affine(self.check.length),)

    def _chains(self) -> Iterator[tuple[Literal, ...]]:
        """Numbers by themselves, and with those of the same line that are used once, before or after their loop."""
        literals = self.check.pattern.literals
        loops = [each for each in literals if len(each.values[-1]) > 1]
        yield from ((each,) for each in literals)
        for loop in loops:
            once = [e for e in literals if len(e.values[-1]) == 1 and e.line == loop.line]
            before = [e for e in once if e.stretch < loop.stretch]
            after = [e for e in once if e.stretch > loop.stretch]
            yield from ((each, loop) for each in before)
            yield from ((loop, each) for each in after)
            yield from ((first, loop, last) for first in before for last in after)


_ONES: tuple[Callable[[tuple[Any, ...]], set[Any]], ...] = (
    set,
    *(lambda runs, at=at: set(runs[at : at + 1]) for at in range(_ONE)),
    *(lambda runs, at=at: set(runs[len(runs) - at - 1 :][:1]) for at in range(_ONE)),
)


def _cut(runs: tuple[Any, ...], edges: tuple[int, int]) -> tuple[Any, ...]:
    return runs[edges[0] : len(runs) - edges[1]]
