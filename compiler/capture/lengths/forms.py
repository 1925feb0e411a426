"""Numbers of an event as functions of the run r of its loop and of the number of steps T: ``a + b r + c T``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from reroll.capture.lengths.template import ADVICE
from reroll.capture.recorder.events import Numbers
from reroll.errors import LengthError

Rows = list[Numbers]
_EDGE = 4
_FEW = 2
EDGES = sorted(((h, e) for h in range(_EDGE + 1) for e in range(_EDGE + 1)), key=lambda pair: (sum(pair), pair))
"""How many first and last runs of a loop may have numbers of their own: the fewest first."""


@dataclass(frozen=True, slots=True)
class Affine:
    """``a + b T``, exactly, for lengths at which it is a whole number."""

    a: int | Fraction
    b: int | Fraction

    def __call__(self, length: int) -> int:
        """The value at a length. Raises LengthError if it is no whole number."""
        value = self.a + self.b * length
        if value != int(value):
            raise LengthError(f"At {length} steps a loop would be run {value} times. {ADVICE}")
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

    def __call__(self, run: int, length: int) -> Numbers:
        """The numbers at a run."""
        return tuple(a + b * run + c * length for a, b, c in zip(self.a, self.b, self.c, strict=True))


def find_forms(
    lengths: Sequence[int], rows: Sequence[Rows], kinds: Sequence[str], loose: tuple[str, ...], line: str
) -> tuple[tuple[Form, ...], tuple[Form, ...], Form]:
    """The forms of one slot in its first runs, last runs and others, with the fewest runs of their own."""
    least = min(len(each) for each in rows)
    if least == 0 or max(len(each) for each in rows) == least == 1:
        one = _fit(lengths, [each[:1] for each in rows], kinds, loose)
        if one is not None and least:
            return (one,), (), one
    for free in ((), loose):
        for head, tail in EDGES:
            if least - head - tail < _FEW:
                continue
            middle = _fit(lengths, [each[head : len(each) - tail] for each in rows], kinds, free, head)
            first = [_fit(lengths, [each[r : r + 1] for each in rows], kinds, free) for r in range(head)]
            last = [_fit(lengths, [each[-1 - r :][:1] for each in rows], kinds, free) for r in range(tail)]
            if middle is not None and all(first) and all(last):
                return tuple(f for f in first if f), tuple(f for f in last if f), middle
    raise LengthError(
        f"What {line} reads or is given changes from step to step in a way that short traces do not explain. Make a "
        "tensor with a row for each step before the loop, and let step t read row t."
    )


def _fit(
    lengths: Sequence[int], rows: Sequence[Rows], kinds: Sequence[str], free: tuple[str, ...], offset: int = 0
) -> Form | None:
    """The form of runs ``offset, offset + 1, ...`` at each length, if there is one; ``free``: kinds that may be so."""
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
