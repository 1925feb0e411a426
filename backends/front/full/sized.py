"""Says once that steps read values as large as the sequence is long: such a step is another one at each length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

from reroll.backends.dynamo.entry import loop_kind
from reroll.errors import warn
from reroll.recurrence import Recurrence, Slices

_IN_A_ROW = 2
Shape = tuple[int, ...]


class Sized:
    """The loops of the last record of one model: how many steps they had, and the sizes of what one of these reads."""

    def __init__(self) -> None:
        self._last = dict[Any, tuple[int, list[Shape]]]()
        self._count, self.told = 0, False

    def note(self, loops: Sequence[Recurrence]) -> None:
        """Note the loops of a record. Warn where sizes grew by as much as a sequence, as they did the time before."""
        pairs = [(self._last.get(loop_kind(each)), each) for each in loops]
        self._last = {loop_kind(each): (each.steps, _sizes(each)) for each in loops}
        known = [(before, each) for before, each in pairs if before is not None]
        longer = {each.steps - steps for (steps, _), each in known} - {0}
        if not longer or self.told:
            return
        sized = [each.where for (_, sizes), each in known if _grown(sizes, _sizes(each)) & longer]
        self._count = self._count + 1 if sized else 0
        if self._count == _IN_A_ROW:
            self.told = True
            warn(
                f"Every step of the loop at {sized[0]} reads a value that is as large as the sequence is long, so each "
                "new length takes seconds: its segments are traced anew, and compiled where no earlier code serves. "
                "Pad sequences to a few lengths."
            )


def _sizes(loop: Recurrence) -> list[Shape]:
    """The sizes of what one step reads: carries, rows, constants."""
    rows = [(loop.examples[each.operand].shape, each.dim) for each in loop.xs if isinstance(each, Slices)]
    whole = chain(loop.examples[: len(loop.carries)], (loop.examples[at] for at in loop.constants))
    return [*(tuple(value.shape) for value in whole), *((*shape[:dim], *shape[dim + 1 :]) for shape, dim in rows)]


def _grown(before: Sequence[Shape], now: Sequence[Shape]) -> set[int]:
    """By how much sizes are others, those of the same place."""
    pairs = chain.from_iterable(zip_longest(*each, fillvalue=0) for each in zip(before, now, strict=False))
    return {int(new) - int(old) for old, new in pairs}
