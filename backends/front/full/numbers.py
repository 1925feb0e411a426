"""Numbers in a step that are others at another length, such as ``1 / T``, become inputs of the step.

A number that is baked in a step makes it another one, whose kernels are traced and compiled anew. So a step that is
known from an earlier record, but for numbers of its arithmetic, reads those that differ as inputs, the same one at each
step. What they are comes from the record itself. The first step of its kind stays as it is, with all of its numbers:
who calls a model at one length has the kernels that know most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reroll.backends.construct.kernels import content
from reroll.capture.steps.numbers import Place, lifted, movable
from reroll.recurrence import Capture, Numbers, Recurrence

_KINDS = 64  # of steps that are known


@dataclass(slots=True)
class _Kind:
    """Steps that are equal but for numbers. ``first``: these numbers in each of the loops of a record over such a step,
    as they were first; ``moving``: which of them have been others since; ``plain``: of how many loops none had then."""

    first: list[tuple[str, ...]] = field(default_factory=list)
    moving: set[int] = field(default_factory=set)
    plain: int = 0

    def moved(self, loop: int, numbers: tuple[str, ...]) -> bool:
        """Whether numbers of a step are not those of the same loop in the first record. Those that are others move."""
        if loop == len(self.first):
            self.first.append(numbers)
            self.plain += not self.moving
        pairs = zip(self.first[loop], numbers, strict=True)
        self.moving |= {at for at, (one, other) in enumerate(pairs) if one != other}
        return loop >= self.plain or numbers != self.first[loop]


class Steps:
    """The steps of the records of one model."""

    def __init__(self) -> None:
        self._kinds = OrderedDict[Any, _Kind]()

    def lifted(self, found: Capture) -> Capture:
        """A capture whose steps read the numbers that are others than in earlier records. Loops of one record are
        compared in their order, each with that in its place: layers with a number of their own keep it."""
        places = [movable(each.step) for each in found.recurrences]
        kinds, count = list(map(self._kind, found.recurrences, places)), Counter[int]()
        moved = list[bool]()
        for kind, numbers in zip(kinds, places, strict=True):
            moved.append(kind.moved(count[id(kind)], tuple(repr(each.value) for each in numbers)))
            count[id(kind)] += 1
        loops = zip(found.recurrences, kinds, places, moved, strict=True)
        read = (_read(*each[:3]) if each[3] else each[0] for each in loops)
        return replace(found, recurrences=tuple(read))

    def _kind(self, loop: Recurrence, places: Sequence[Place]) -> _Kind:
        key = content(loop.step, places)
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        return kind


def _read(loop: Recurrence, kind: _Kind, places: Sequence[Place]) -> Recurrence:
    """A loop whose step reads the numbers that move."""
    chosen = [places[at] for at in sorted(kind.moving)]
    if not chosen:
        return loop
    tables = [Numbers((each.value,) * loop.steps) for each in chosen]
    step = lifted(loop, chosen, [each.dtype for each in tables])
    return replace(loop, step=step, xs=(*loop.xs, *tables))
