"""A program runs eager segments at first, and compiled ones take over at a training call that is fixed beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from reroll.backends.construct.plan import Built
from reroll.backends.construct.stages.proof import eager
from reroll.backends.inductor.written.ahead import Ahead
from reroll.backends.tiers.device import home_of
from reroll.errors import BudgetError, RerollError, warn
from reroll.planning.options import Options

CALL = 9
"""The training call at which compiled segments take over."""

_AHEAD = 2  # the training call at which another process begins to compile them
_SETTLED = 3  # training calls after which the new times are told
LOG = logging.getLogger(__name__)
Made = TypeVar("Made")


@dataclass(slots=True, eq=False)
class Takeover:
    """Which segments a program runs, eager or compiled ones.

    options: the user's. training_calls: that have begun. compiled: whether compiled segments run. stays: eager ones do
    for good, as no others could be made. before: seconds of a step of the loops by eager segments, at their last call.
    prepare: makes the compiled segments, but for what is compiled; ``ahead`` compiles that.
    """

    options: Options
    training_calls: int = 0
    compiled: bool = True
    stays: bool = False
    before: float | None = None
    prepare: Callable[[], object] | None = None
    ahead: Ahead | None = None

    @classmethod
    def of(cls, options: Options) -> Takeover:
        """That of a program which has not run. Only with ``start="eager"`` is there another stage than the last."""
        return cls(options, compiled=options.start == "compiled" or options.lowering == "eager")

    @property
    def due(self) -> bool:
        """Whether compiled segments take over at the next call."""
        return not self.compiled and not self.stays and self.training_calls >= CALL - 1 and torch.is_grad_enabled()

    def made(self, make: Callable[[Options], Made], present: Made | None = None) -> Made:
        """The program of the next call, ``present`` where that goes on. Where compiled segments are due and cannot be
        made, eager ones stay; where eager ones meet no budget, compiled ones run at once."""
        if self.due:
            if self.ahead is not None:
                self.ahead.end()
                self.ahead = None
            try:
                made = make(self.options)
            except (RerollError, RuntimeError, OSError) as error:  # torch's own errors of compilers, and of caches
                self.stays = True
                warn(f"The loops go on with eager segments, since compiled ones cannot take over: {error}")
            else:
                self.compiled = True
                return made
        if present is not None:
            return present
        if not self.compiled:
            try:
                return make(eager(self.options))
            except BudgetError:
                if self.stays:
                    raise
                self.compiled = True
        return make(self.options)

    def note(self, built: Sequence[Built]) -> None:
        """A call of these loops begins."""
        if self.options.start == "compiled" or not torch.is_grad_enabled():
            return
        if not any(each.kernels.traced.tangents for each in built):
            return
        if not self.compiled:
            self.before = _seconds(built)
        self.training_calls += 1
        if not self.compiled:
            self._compile_ahead(built)
        if self.compiled and self.training_calls == CALL + _SETTLED:
            self._tell(built)

    def _compile_ahead(self, built: Sequence[Built]) -> None:
        """Have another process compile what will take over, for a CPU. Where that cannot be, the takeover does, and
        says why."""
        if any(home_of(each.executable.recurrence.examples).type != "cpu" for each in built):
            return
        with suppress(Exception):
            if self.training_calls == _AHEAD and self.prepare is not None:
                self.ahead = Ahead.begin(self.prepare)
            elif self.ahead is not None:
                self.ahead.ask()

    def _tell(self, built: Sequence[Built]) -> None:
        now, where = _seconds(built), " and ".join(dict.fromkeys(each.executable.recurrence.where for each in built))
        if now and self.before:
            LOG.info("compiled segments run the loop at %s: %.1f times as fast as eager ones", where, self.before / now)


def _seconds(built: Sequence[Built]) -> float | None:
    """Seconds of a step of some loops, forward and backward, at their last call; None before one has ended."""
    seconds = [each.executable.clock.seconds for each in built]
    known = [each for each in seconds if each is not None]
    steps = sum(each.executable.recurrence.steps for each in built)
    return sum(known) / steps if steps and len(known) == len(seconds) else None
