"""The user's numbers at a length, found by their values at the lengths of the pattern.

A number of Dynamo's graph that depends on the length is one that the model's own run used too. What it is at another
length is read from there, so that any function of the step and the length will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from reroll.capture.lengths.check import Check
from reroll.capture.lengths.forms import EDGES
from reroll.capture.lengths.pattern import Literal

_Values = tuple[int | float, ...]
_ONE = 4


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
        """A free number that nobody asked for, if there is one: then it is not known what it does at this length."""
        for each in self.check.pattern.literals:
            slot = self.check.pattern.stretches[each.stretch].slots[each.slot]
            free = any(each.column in form.free for form in (*slot.head, *slot.tail, slot.middle))
            if free and id(each) not in self.asked:
                return each
        return None

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
