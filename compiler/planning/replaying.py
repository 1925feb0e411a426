"""Replayed products: whether backwards repeat products from what is kept of spikes, or find what these gave."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from reroll.planning.choice import SLOWER, Choice, steps_run
from reroll.planning.options import Options, parse_budget
from reroll.schedules.named import least_memory
from reroll.schedules.problem import Problem

_HALF = 0.5  # of the memory: what is left where replaying is worth its time without a budget


@dataclass(frozen=True, slots=True)
class Replaying:
    """What replaying products would change for segments of ``segment`` steps.

    Bytes: a tape of a segment is ``kept`` without and ``replayed`` with it, a ``carry`` is kept between segments, and
    ``beside`` is held whatever tapes are: gradients of weights, and these weights packed. ``work``: that of a step
    which replays, as a multiple of that of one which does not, by the arithmetic of products and the bytes that are
    made (``reroll.graph.work``); products of sparse spikes take less.
    """

    segment: int
    carry: int
    kept: int
    replayed: int
    beside: int
    work: float

    def pays(self, steps: int, options: Options, loops: int = 1) -> bool:
        """Whether products are replayed in a loop of so many steps, which shares a budget with the others of its graph.

        Always where that takes no more time than a plan may take to hold less, and where plans follow the memory that
        is free, for which segments are not compiled anew. Under a budget in bytes, where plans that keep what products
        gave and fit it run more again than is replayed. Else where it halves the memory.
        """
        if self.work <= SLOWER or options.automatic_budget:
            return True
        budget = parse_budget(options.memory_budget)
        if isinstance(budget, int):
            return self._times(steps, budget // loops - self.beside, options) > self.work
        return self._kept_bytes(steps, self.replayed) <= _HALF * self._kept_bytes(steps, self.kept)

    def _kept_bytes(self, steps: int, tape: int) -> int:
        return self.beside + -(-steps // self.segment) * tape

    def _times(self, steps: int, memory: int, options: Options) -> float:
        """The time of the fastest plan that keeps what products gave, in so many bytes for carries and tapes, as a
        multiple of that of ``store_all``; infinite where there is none."""
        problem = Problem(steps, self.segment, max(self.carry, 1), max(self.kept, 1), memory=memory)
        if memory >= problem.segments * problem.tape:
            return 1.0
        if options.schedule == "store_all" or memory < least_memory(problem):
            return inf
        return steps_run(Choice("revolve", problem)) / steps_run(Choice("store_all", problem))
