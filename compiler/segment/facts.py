"""Facts about the elements of a tensor: the lattice of the sparsity analysis.

From strong to weak: at most two constants, integers in a range, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reroll.graph.private import outside_modes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FOLLOWED = (*FLOATS, *INTEGERS, torch.bool)  # dtypes whose values are followed
LOSSY = {"bfloat16": 2, "int8": 1}  # codecs that round, used on request only, and the bytes of an element
EXACT = 256  # integers up to here are exact in every float format from bfloat16 on
SMALL = 1 << 15  # integers in [-SMALL, SMALL) are small: they fit int16


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of every element of a tensor of ``dtype``.

    ``patterns``: at most two constants, as bit patterns, so that 0.0 and -0.0 differ. Otherwise ``low`` and ``high``:
    integers in [low, high], a zero of either sign. Otherwise nothing. ``dtype`` is None where it is not known.
    """

    dtype: torch.dtype | None = None
    patterns: tuple[int, ...] = ()
    low: int | None = None
    high: int | None = None

    @property
    def values(self) -> tuple[bool | int | float, ...]:
        """The constants as Python numbers; empty where they are not known."""
        if self.dtype is None or not self.patterns:
            return ()
        with outside_modes():
            return tuple(torch.tensor(self.patterns, dtype=WORDS[self.dtype.itemsize]).view(self.dtype).tolist())

    @property
    def known(self) -> bool:
        """Whether anything is known beyond the dtype."""
        return bool(self.patterns) or self.low is not None

    @property
    def binary(self) -> bool:
        """Whether every element is exactly 0 or 1 (or a boolean)."""
        return bool(self.patterns) and set(self.patterns) <= set(constants(self.dtype, (0, 1)).patterns)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Least and greatest value, where all values are integers that every format represents."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        values = self.values
        if not values or not all(map(exact, values)):
            return None
        return int(min(values)), int(max(values))

    @property
    def codec(self) -> str:
        """The codec that fits: "bits", "two", "small", or "sparse", which is measured at run time."""
        if self.patterns:
            return "bits" if self.binary else "two"
        return "sparse" if self.low is None else "small"

    def describe(self) -> str:
        """A few words for a report, such as ``{0, 1}`` or ``integers in [0, 5]``."""
        if self.dtype is torch.bool and len(self.patterns) == 2:
            return "boolean"
        if self.patterns:
            return "{" + ", ".join(f"{value:g}" for value in self.values) + "}"
        return "unknown" if self.low is None else f"integers in [{self.low}, {self.high}]"

    def join(self, other: Fact) -> Fact:
        """The strongest fact that holds wherever one of the two does."""
        if self.dtype != other.dtype or not (self.known and other.known):
            return Fact(self.dtype if self.dtype == other.dtype else None)
        if self.patterns and other.patterns:
            return one_of(self.dtype, set(self.patterns) | set(other.patterns))
        return hull(self.dtype, (self.bounds, other.bounds))


def kept_as(fact: Fact, codec: str) -> str:
    """The codec of a tensor of which a fact holds, under the option ``codec``.

    Only floats of which nothing is proved are rounded, if that makes them smaller.
    """
    if codec not in LOSSY or fact.codec != "sparse" or fact.dtype not in FLOATS:
        return fact.codec
    return codec if fact.dtype.itemsize > LOSSY[codec] else fact.codec


def constants(dtype: torch.dtype | None, values: Iterable[bool | int | float]) -> Fact:
    """The fact that a tensor of ``dtype`` holds only ``values``, rounded to it; unknown where that cannot be said."""
    if dtype not in FOLLOWED:
        return Fact(dtype)
    with outside_modes():
        try:
            rounded = torch.tensor(list(values), dtype=dtype, device="cpu")
        except (RuntimeError, OverflowError, TypeError, ValueError):  # a value that the dtype does not hold
            return Fact(dtype)
        return one_of(dtype, rounded.view(WORDS[rounded.dtype.itemsize]).tolist())


def integers(dtype: torch.dtype, low: int, high: int) -> Fact:
    """The fact that a tensor of ``dtype`` holds only integers in [low, high]; unknown where they are not small."""
    return hull(dtype, ((low, high),))


def bits(dtype: torch.dtype) -> Fact:
    """The fact that a tensor of ``dtype`` holds only 0 and 1."""
    return constants(dtype, (0, 1))


def exact(value: Any) -> bool:
    """Whether a number is an integer that every format holds, and not -0.0."""
    if isinstance(value, float) and (not value.is_integer() or str(value) == "-0.0"):
        return False
    return isinstance(value, (bool, int, float)) and -EXACT <= value <= EXACT


def one_of(dtype: torch.dtype | None, patterns: Iterable[int]) -> Fact:
    """At most two constants; more become a range of integers. NaN is never kept: its payload is nobody's promise."""
    fact = Fact(dtype, tuple(sorted(set(patterns))))
    values = fact.values
    if any(value != value for value in values):
        return Fact(dtype)
    if len(values) <= 2:
        return fact
    return hull(dtype, ((int(min(values)), int(max(values))),)) if all(map(exact, values)) else Fact(dtype)


def hull(dtype: torch.dtype | None, ranges: Sequence[tuple[int, int] | None]) -> Fact:
    """The range that covers all; unknown where one is missing, or it is not small, or the dtype would wrap or round."""
    known = [bounds for bounds in ranges if bounds is not None]
    if not known or len(known) < len(ranges) or dtype not in FLOATS + INTEGERS:
        return Fact(dtype)
    low, high = min(bounds[0] for bounds in known), max(bounds[1] for bounds in known)
    least, most = (-EXACT, EXACT) if dtype in FLOATS else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if low < max(least, -SMALL) or high > min(most, SMALL - 1):
        return Fact(dtype)
    if dtype in INTEGERS and high - low <= 1:
        return constants(dtype, (low, high))
    return Fact(dtype, (), low, high)
