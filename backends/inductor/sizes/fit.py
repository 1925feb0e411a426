"""Numbers of graphs of one structure as functions of a few sizes: what is read off some graphs, and tried on others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import prod
from typing import Any

from reroll.backends.inductor.sizes.numbers import Numbers

_LEAST = 2  # sizes of 0 and 1 are special: such dimensions are broadcast


@dataclass(frozen=True, slots=True)
class Form:
    """``factor`` times the sizes ``of``, plus an ``offset``; of no size: the offset."""

    of: tuple[int, ...]
    factor: int
    offset: int | float

    def __call__(self, sizes: Sequence[Any]) -> Any:
        """The number at some sizes."""
        return self.factor * prod(sizes[each] for each in self.of) + self.offset if self.of else self.offset


@dataclass(frozen=True, slots=True)
class Ratio:
    """One form over another: ``1 / n`` of a mean, ``n / (n - 1)`` of a variance."""

    above: Form
    below: Form

    def __call__(self, sizes: Sequence[Any]) -> Any:
        """The number at some sizes."""
        return self.above(sizes) / self.below(sizes)


@dataclass(frozen=True, slots=True)
class Fit:
    """Numbers as ``forms`` of sizes, which are the numbers at the places ``bases``."""

    bases: tuple[int, ...]
    forms: tuple[Form | Ratio, ...]

    def sizes(self, numbers: Numbers) -> tuple[int, ...]:
        """The sizes of a graph with these numbers."""
        return tuple(int(numbers[place]) for place in self.bases)

    def holds(self, numbers: Numbers) -> bool:
        """Whether all numbers are what the forms give at their sizes."""
        sizes = self.sizes(numbers)
        return min(sizes) >= _LEAST and all(
            form(sizes) == number for form, number in zip(self.forms, numbers, strict=True)
        )


def fit(samples: Sequence[Numbers], places: Iterable[int]) -> Fit | None:
    """Numbers of several graphs as functions of sizes, which are at ``places``; None if nothing changes or fits."""
    columns = list(zip(*samples, strict=True))
    changing = {columns[place]: place for place in reversed(list(places)) if _changes(columns[place])}
    if any(min(column) < _LEAST for column in changing):
        return None
    bases = dict[Numbers, int]()
    for column in sorted(changing, key=lambda each: each[::-1]):
        if _form(column, list(bases)) is None:
            bases[column] = changing[column]
    forms = [_form(column, list(bases)) or _ratio(column, list(bases)) for column in columns]
    found = [form for form in forms if form is not None]
    return Fit(tuple(bases.values()), tuple(found)) if bases and len(found) == len(forms) else None


def _changes(column: Numbers) -> bool:
    return len(set(column)) > 1


def _form(column: Numbers, bases: Sequence[Numbers]) -> Form | None:
    """A column of numbers as a multiple of a size, of two, or of one and an offset: the first of these that fits."""
    if not _changes(column):
        return Form((), 0, column[0])
    indices = range(len(bases))
    for of in [(each,) for each in indices] + list(combinations_with_replacement(indices, 2)):
        form = _through(column, of, [prod(each) for each in zip(*(bases[at] for at in of), strict=True)], affine=False)
        if form is not None:
            return form
    forms = (_through(column, (each,), bases[each], affine=True) for each in indices)
    return next((form for form in forms if form is not None), None)


def _through(column: Numbers, of: tuple[int, ...], base: Sequence[Any], *, affine: bool) -> Form | None:
    """A form through all points, if there is one with whole numbers that does not fall."""
    first, other = base[0], next((each for each in base if each != base[0]), None)
    if other is None or not all(isinstance(each, int) for each in column):
        return None
    rise, run = column[base.index(other)] - column[0], other - first
    factor = int(rise // run if affine else column[0] // first)
    offset = column[0] - factor * first if affine else 0
    fits = all(factor * each + offset == number for each, number in zip(base, column, strict=True))
    return Form(of, factor, offset) if fits and factor >= 1 else None


def _ratio(column: Numbers, bases: Sequence[Numbers]) -> Ratio | None:
    """A column as one over a number, or as a number over the one before it, if that fits to the bit."""
    if not all(isinstance(each, float) and each > 0 for each in column):
        return None
    if all(each < 1 for each in column):
        below = _form(tuple(round(1 / each) for each in column), bases)
        found = Ratio(Form((), 0, 1), below) if below else None
    elif all(1 < each <= _LEAST for each in column):
        above = _form(tuple(round(each / (each - 1)) for each in column), bases)
        found = Ratio(above, replace(above, offset=above.offset - 1)) if above else None
    else:
        return None
    exact = found and all(found(sizes) == each for sizes, each in zip(zip(*bases, strict=True), column, strict=True))
    return found if exact else None
