"""What instructions make and keep while a program is played."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from reroll.backends.codecs.codec import Encoded, decode
from reroll.backends.tiers.tier import Block


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A carry as it is run from: tensors, and the random number state before its step (None: the present one).

    ``made`` by a segment, so that the facts about carries hold, or by whoever calls.
    """

    tensors: tuple[Tensor, ...]
    random: tuple[Tensor, ...] | None = None
    made: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A carry that is kept locally, encoded."""

    tensors: tuple[Encoded, ...]
    random: tuple[Tensor, ...] | None

    def carry(self) -> Carry:
        """The carry, decoded."""
        return Carry(tuple(decode(tensor) for tensor in self.tensors), self.random)


@dataclass(slots=True)
class Ledger:
    """What all calls together have kept so far: carries, and their bytes before and after compression.

    ``gradient_error``: what was measured last of a codec that rounds.
    """

    carries: int = 0
    plain_nbytes: int = 0
    kept_nbytes: int = 0
    gradient_error: float | None = None

    def enter(self, tensors: tuple[Encoded, ...]) -> None:
        """Add one carry."""
        self.carries += 1
        self.plain_nbytes += sum(tensor.numel * tensor.dtype.itemsize for tensor in tensors)
        self.kept_nbytes += sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A block of carries in a remote tier: ``width`` tensors each, and their random number states."""

    block: Block
    width: int
    randoms: tuple[tuple[Tensor, ...] | None, ...]

    def read(self) -> list[Kept | None]:
        """Wait for the carries of the block."""
        values, width = self.block.read(), self.width
        return [Kept(tuple(values[n * width : (n + 1) * width]), random) for n, random in enumerate(self.randoms)]


@dataclass(frozen=True, slots=True, eq=False)
class Reloaded:
    """A block on its way back from its ``source``; without one it is here. A carry is None once nobody picks it."""

    source: Stored | None
    carries: list[Kept | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Rows of a sequence, as a view of it: what a segment saved of them was a copy, which is made again."""

    rows: Tensor


@dataclass(slots=True, eq=False)
class Tape:
    """Saved tensors of taped segments, and ``Unpacked`` rows, in order: (first step, steps, saved). ``passing``: no
    segment runs forward before they are used, so they may stay where the next one would put its own. ``unread``: the
    carry behind them is read by nobody. ``thin``: they are those of thin tapes."""

    passing: bool = False
    unread: bool = False
    thin: bool = False
    segments: list[tuple[int, int, list[Any]]] = field(default_factory=list)
