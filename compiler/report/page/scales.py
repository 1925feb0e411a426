"""Axes: where a value lies on them, and which values are written beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from reroll.report.tables import nbytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from ``low`` to ``high``. ``ticks`` are (value, text); ``log``: equal ratios are equally far apart."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = field(default=())

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(value) if self.log else value
        return (value - low) / (high - low) if high > low else 0.0


def bytes_scale(most: int) -> Scale:
    """Bytes from zero to a little more than ``most``, with ticks at powers of two."""
    high = 1.08 * max(most, 1)
    step = 2 ** math.ceil(math.log2(max(high / 4, 1)))
    return Scale(0, high, ticks=_ticks(0, high, step, nbytes_text))


def bytes_log_scale(values: Iterable[int]) -> Scale:
    """Bytes over orders of magnitude."""
    found = [max(value, 1) for value in values]
    low, high = min(found) / 1.3, max(found) * 1.3
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = max(-(-len(exponents) // 5), 1)
    ticks = tuple((2.0**exponent, nbytes_text(2**exponent)) for exponent in exponents[::stride])
    return Scale(low, high, log=True, ticks=ticks)


def seconds_scale(low: float, high: float, nominal: bool = False) -> Scale:
    """Seconds, or units of nominal costs."""
    step = max(_round(max(high - low, 1e-12) / 7), 1.0 if nominal else 0.0)

    def text(value: float) -> str:
        return _counted(value) if nominal or not value else seconds_text(value)

    return Scale(low, max(high, 1e-12), ticks=_ticks(low, high, step, text))


def steps_scale(low: int, high: int) -> Scale:
    """Steps of the sequence."""
    return Scale(low, high, ticks=_ticks(low, high, max(_round(max(high - low, 1) / 5), 1), _counted))


def _counted(value: float) -> str:
    return f"{value:,.0f}"


def _round(step: float) -> float:
    """The least of 1, 2, 5, 10, 20, ... and their tenths that is not below ``step``."""
    size = 10.0 ** math.floor(math.log10(step))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size >= 0.999 * step)


def _ticks(low: float, high: float, step: float, text: Callable[..., str]) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [index * step for index in range(first, last + 1)]
    return tuple((value, text(int(value) if text is nbytes_text else value)) for value in values)
