"""One rewrite of each recurrence, where it is legal."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from reroll.capture.fusion.row_analysis import Illegal
from reroll.recurrence import Capture, Recurrence


def where_legal(
    found: Capture, look: Callable[[fx.Graph, Recurrence], object], rewrite: Callable[[Capture, Recurrence], Capture]
) -> Capture:
    """The capture with each recurrence rewritten for which neither ``look`` nor ``rewrite`` raises Illegal.

    ``look`` comes first, on the graph itself: a copy takes as long as all else.
    """
    for recurrence in found.recurrences:
        try:
            look(found.outer, recurrence)
            found = rewrite(found, recurrence)
        except Illegal:
            continue
    return found
