"""What a pass may know besides the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reroll.schedules.interval import Interval

if TYPE_CHECKING:
    from reroll.recurrence import Recurrence
    from reroll.segment.sparsity import Fact


@dataclass(frozen=True, slots=True)
class Context:
    """Decisions and facts that passes turn into instructions.

    Passes on the step, on halves and on programs are told the same of a recurrence, but for what is known later:
    ``facts`` are empty for those on the step, before which nothing is traced; ``root`` is that of plain BPTT, and
    ``ahead`` its default, until a schedule is chosen, for those on programs. ``recurrence`` has the step as the passes
    on it left it, once they have run.

    ``root`` says which carries are kept where; ``facts`` what was proved of each tensor of the carry; ``codec`` is
    the option. ``lowering`` is how segments run, "inductor" or "eager"; ``vectors``, whether for a CPU whose vectors
    our kernels are made for. ``ahead``: whether there is room for a block that is read before it is needed.
    """

    root: Interval
    recurrence: Recurrence | None = None
    facts: tuple[Fact, ...] = ()
    codec: str = "auto"
    lowering: str = "eager"
    vectors: bool = False
    ahead: bool = True
