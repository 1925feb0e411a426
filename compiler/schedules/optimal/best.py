"""The best schedule for segments, memory and tiers: which method serves which case."""

from __future__ import annotations

import numpy as np

from reroll.schedules.optimal.blend import blend
from reroll.schedules.optimal.priced import chains
from reroll.schedules.optimal.problem import LocalSlots, OneTier, Piece, Schedule, SlowTier, at_least_one, gap, stores
from reroll.schedules.optimal.revolve import Revolve
from reroll.schedules.optimal.tabled import tabled
from reroll.schedules.optimal.two_level import two_level

_CELLS = 20_000  # carries times steps up to which tables take less than half a second


def optimum(steps: int, fast: OneTier | LocalSlots, *slow: SlowTier) -> Schedule:
    """The best schedule that is known for ``steps`` segments, ``slow`` tiers in the order of their cost.

    It is optimal, with a ``gap`` of 0, in slots with at most one slow tier (Griewank and Walther 2000; Herrmann and
    Pallez 2020), and for few segments in any tiers. In bytes, or over three and more tiers, ``gap`` says by how much it
    may be worse than an optimal one. With slow tiers the ``memory`` of a OneTier is what is free beside one carry, that
    of the piece which is reversed. Raises OptionError for fewer than one step.
    """
    at_least_one(steps=steps)
    slow = tuple(tier for tier in slow if tier.slots != 0)
    if isinstance(fast, LocalSlots) and not slow:
        return Revolve(Piece(steps, 0, min(fast.slots, steps) - 1))
    if isinstance(fast, LocalSlots) and len(slow) == 1:
        return two_level(steps, fast, slow[0])
    tiers = stores(steps, fast, slow)
    found = blend(tiers, steps)
    tables = sum(1 if tier.rooms >= steps else tier.rooms for tier in tiers)
    return tabled(tiers, steps) if gap(found) > 0 and steps * tables <= _CELLS else found


def farthest(fast: OneTier | LocalSlots, runs: int, most: int) -> int:
    """How many segments, up to ``most``, can be reversed if none has more than ``runs`` extra runs.

    N(m, r) = N(m, r - 1) + max(N(m - 1, r), block(m)), with ``block(m)`` segments taped at once where m further carries
    could be kept. In slots this is C(s + r, s), Griewank and Walther (2000), theorem 1.
    """
    blocks = fast.blocks(most)
    lengths = np.zeros_like(blocks)
    for _ in range(runs + 1):
        lengths = np.minimum(chains(lengths + blocks, lengths)[0], most)
    return int(lengths[-1])
