"""A call of a recurrence before its first step: from here it can be played as often as need be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.randomness import random_state, set_random_state
from reroll.backends.runtime.witness import Witness


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The operands of a call, the random numbers with which it begins (None: it draws none), and who compares carries
    that are reached again (``verify``)."""

    operands: tuple[Tensor, ...]
    random: tuple[Tensor, ...] | None
    witness: Witness | None

    @classmethod
    def of(cls, executable: Executable, operands: Sequence[Tensor]) -> Start:
        """A call that begins now."""
        recurrence = executable.recurrence
        random = random_state(operands) if recurrence.random else None
        return cls(tuple(operands), random, Witness(recurrence) if executable.verify else None)

    def rewind(self) -> None:
        """Put back the random numbers with which the call began."""
        if self.random is not None:
            set_random_state(self.random)
