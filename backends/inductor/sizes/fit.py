"""Numbers of graphs of one structure as functions of a few sizes: what is read off some graphs, and tried on others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import gcd, prod
from typing import Any

from reroll.backends.inductor.sizes.numbers import Numbers

_SMALL = 1e-15  # no ratio of sizes is smaller
_DIVISORS = range(2, 9)  # of the parts of a size that are looked for
_LEAST = 2  # sizes of 0 and 1 are special: such dimensions are broadcast


@dataclass(frozen=True, slots=True)
class Form:
    """``factor`` times the sizes ``of``, plus an ``offset``, by a ``divisor``, rounded down, ``times`` a number; of no
    size: the offset."""

    of: tuple[int, ...]
    factor: int
    offset: int | float
    divisor: int = 1
    times: int = 1

    def __call__(self, sizes: Sequence[Any]) -> Any:
        """The number at some sizes."""
        whole = self.factor * prod(sizes[each] for each in self.of) + self.offset if self.of else self.offset
        return whole if self.divisor == 1 else whole // self.divisor * self.times


@dataclass(frozen=True, slots=True)
class Ratio:
    """One form over another, a float: ``1 / n`` of a mean, ``n / (n - 1)`` of a variance, ``n / 1``."""

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
    """Numbers of several graphs as functions of sizes, which are at ``places``; None if no size changes.

    Raises ValueError for a number that follows no size.
    """
    columns = list(zip(*samples, strict=True))
    changing = {columns[place]: place for place in reversed(list(places)) if _changes(columns[place])}
    if not changing or any(min(column) < _LEAST for column in changing):
        return None
    bases = dict[Numbers, int]()
    for column in sorted(changing, key=lambda each: each[::-1]):
        if _form(column, list(bases)) is None:
            bases[column] = changing[column]
    known = list(bases)
    forms = [_form(column, known) or _part(column, known) or _ratio(column, known) for column in columns]
    found = [form for form in forms if form is not None]
    if len(found) < len(forms):
        odd = columns[forms.index(None)]
        raise ValueError(f"a number that is {' and '.join(map(str, odd))} follows none of the sizes that change")
    return Fit(tuple(bases.values()), tuple(found))


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


def _part(column: Numbers, bases: Sequence[Numbers]) -> Form | None:
    """A column as a part of a size, such as a half, rounded up or down, or as a multiple of it."""
    if not all(isinstance(each, int) for each in column):
        return None
    times = gcd(*(int(each) for each in column)) or 1
    tried = (
        Form((at,), factor, offset, divisor, each)
        for each in dict.fromkeys((1, times))
        for at in range(len(bases))
        for divisor in _DIVISORS
        for factor in range(1, divisor)
        for offset in range(divisor)
    )
    sizes = list(zip(*bases, strict=True))
    return next((form for form in tried if [form(each) for each in sizes] == list(column)), None)


def _ratio(column: Numbers, bases: Sequence[Numbers]) -> Ratio | None:
    """A column of floats as one over a number, as a number over the one before it, or as a whole number, if that fits
    to the bit."""
    if not all(isinstance(each, float) and each > _SMALL for each in column):
        return None
    if all(each < 1 for each in column):
        below = _form(tuple(round(1 / each) for each in column), bases)
        found = Ratio(Form((), 0, 1), below) if below else None
    elif all(1 < each <= _LEAST for each in column):
        above = _form(tuple(round(each / (each - 1)) for each in column), bases)
        found = Ratio(above, replace(above, offset=above.offset - 1)) if above else None
    else:
        above = _form(tuple(round(each) for each in column), bases)
        found = Ratio(above, Form((), 0, 1)) if above else None
    exact = found and all(found(sizes) == each for sizes, each in zip(zip(*bases, strict=True), column, strict=True))
    return found if exact else None
