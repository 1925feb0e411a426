"""A program runs eager segments at first, and compiled ones take over at a training call that is fixed beforehand.

That is when eager ones have run for about as long as compiling takes: never more than twice the best that could have
been done. How long they run is read off their graphs, not measured, so that a script has its takeovers at the same
calls whatever the machine does. The call before it tries the compiled ones (``trial``): where they do not reproduce
what eager ones give, those stay.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from reroll.backends.construct.kernels import Kernels
from reroll.backends.construct.lent import LENDERS, NotLentError
from reroll.backends.construct.plan import Built
from reroll.backends.construct.stages.proof import eager, not_reproduced
from reroll.backends.construct.stages.trial import Trials
from reroll.backends.inductor.whole import CACHED
from reroll.backends.inductor.wrapper_codegen.ahead import Ahead
from reroll.backends.progress import tell
from reroll.backends.tiers.device import home_of
from reroll.errors import BudgetError, ProofError, RerollError, warn
from reroll.graph.work import eager_seconds
from reroll.planning.options import Options

CALL = 9
"""The first training call at which compiled segments may take over."""
COMPILING = 30.0
"""Seconds of eager training after which they do: about what it takes to compile them."""

AGAIN = 2.0
"""Seconds of eager training of one program, after which its own do: about what it takes where another program of the
same loops was compiled before."""

_AHEAD = 2, COMPILING / 10  # training calls and seconds after which another process begins to compile them
_SETTLED = 3  # training calls after which the new times are told
_MET: dict[str, str] = {}  # for the lines of loops the sizes of their states, when they were last met
_ASIDE: ContextVar[bool] = ContextVar("_ASIDE", default=False)
_MEASURING: ContextVar[bool] = ContextVar("_MEASURING", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, a tool calls a model to look at it: compiled segments run at once, as it is they that a user asks about.
    Such calls are neither counted nor proved."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


def is_aside() -> bool:
    """Whether a call is a tool's."""
    return _ASIDE.get()


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, what calls cost is measured: no model is looked at again, as that becomes ever more seldom."""
    token = _MEASURING.set(True)
    try:
        yield
    finally:
        _MEASURING.reset(token)


def is_measured() -> bool:
    """Whether what a call costs is measured."""
    return _MEASURING.get()


class Program(Protocol):
    """What runs at a call: a graph with loops."""

    @property
    def built(self) -> Sequence[Built]:
        """Its loops with their present plans."""


Made = TypeVar("Made", bound=Program)


@dataclass(slots=True)
class Spent:
    """Training ``calls`` that have begun, and the ``seconds`` that their eager segments take, about, by the graphs.
    ``taken``: the compiled segments that took over."""

    calls: int = 0
    seconds: float = 0.0
    taken: weakref.WeakSet[Kernels] = field(default_factory=weakref.WeakSet)


@dataclass(slots=True, eq=False)
class Takeover:
    """Which segments a program runs, eager or compiled ones.

    options: the user's; at_once: those by which segments are compiled, rather than lent. spent: by all programs of a
    model that count together; ``own``: by this one; ``lasting``: seconds of a step, for each of its loops. compiled:
    whether compiled segments run. stays: eager ones do for good, as no others could be made. before: seconds of a step
    of the loops by eager segments, at their last call. prepare: makes the compiled segments, but for what is compiled;
    ``ahead`` compiles that, which is ``begun`` once. took_over: training calls since compiled ones did. trials: of
    compiled segments, once they are there; ``tried``: the program whose call tries them, and the one that may take over
    from it. asked: how many programs of training had compiled segments when theirs were last asked for, for calls
    without gradients. lent: whether such segments run.
    """

    options: Options
    at_once: Options
    spent: Spent = field(default_factory=Spent)
    own: float = 0.0
    lasting: dict[Kernels, float] = field(default_factory=dict)
    compiled: bool = True
    stays: bool = False
    before: float | None = None
    prepare: Callable[[], object] | None = None
    begun: bool = False
    took_over: int | None = None
    ahead: Ahead | None = None
    trials: Trials | None = None
    tried: tuple[Any, Any] | None = None
    asked: int = 0
    lent: bool = False

    @classmethod
    def of(cls, options: Options, spent: Spent | None = None) -> Takeover:
        """That of a program which has not run, where others may have ``spent``. Only with ``start="eager"`` is there
        another stage than the last."""
        at_once = options if options.start == "compiled" else replace(options, start="compiled")
        last = options.start == "compiled" or options.lowering == "eager"
        return cls(options, at_once, Spent() if spent is None else spent, compiled=last)

    @property
    def due(self) -> bool:
        """Whether compiled segments are tried at the next call, or take over."""
        if self.compiled or self.stays:
            return False
        if is_aside():
            return True
        if self.only_lent:
            return LENDERS.count > self.asked
        last = CALL - 1 if self.trials is not None or self.options.proof == "never" else CALL - 2
        spent = self.spent.calls >= last and self.spent.seconds >= COMPILING
        return torch.is_grad_enabled() and spent and self.own >= min(AGAIN, COMPILING)

    @property
    def only_lent(self) -> bool:
        """Whether a call runs compiled segments only where training has them: one without gradients."""
        return self.options.start == "eager" and not torch.is_grad_enabled() and not is_aside()

    @property
    def summary(self) -> str:
        """What was compared of compiled segments, once they were tried."""
        if self.lent:
            return "compiled segments are the forward halves of training"
        return "" if self.trials is None else self.trials.summary

    def made(self, make: Callable[[Options], Made], present: Made | None = None) -> Made:
        """The program of the next call, ``present`` where that goes on. Where compiled segments are due and cannot be
        made, or do not reproduce what eager ones give, these stay; where eager ones meet no budget, compiled ones run
        at once. Raises ProofError with ``proof="always"`` where nothing is reproduced."""
        if self.only_lent and (self.due or self.compiled):
            self.asked = LENDERS.count
            with suppress(NotLentError):
                lent = make(self.options)
                self.compiled = self.lent = True
                return lent
            return present if present is not None else self._made_first(make)
        following = self._following(make, present) if self.due else None
        if following is not None and (is_aside() or self.trials is not None or self.options.proof == "never"):
            self.compiled, self.tried, self.took_over = True, None, 0
            self.lasting.clear()  # which holds eager segments
            for each in following.built:
                LENDERS.add(each.kernels, each.options)
                if not is_aside():
                    self.spent.taken.add(each.kernels)
            return following
        running = present if present is not None else self._made_first(make)
        if following is not None:
            self.trials, self.tried = Trials(running.built, following.built), (running, following)
        return running

    def _made_first(self, make: Callable[[Options], Made]) -> Made:
        if not self.compiled or self.only_lent:
            try:
                return make(eager(self.options))
            except BudgetError:
                if self.stays:
                    raise
                self.compiled = True
        return make(self.at_once)

    def _following(self, make: Callable[[Options], Made], present: Made | None) -> Made | None:
        """The program of compiled segments; None where there is none, or none that reproduces."""
        if self.ahead is not None:
            self.ahead.end()
            self.ahead = None
        if self.trials is not None:
            self.trials.end()
            if self.trials.differs:
                self._stay(not_reproduced(self.trials))
                return None
            if self.tried is not None and self.tried[0] is present:
                found: Made = self.tried[1]
                return found
        try:
            return make(self.at_once)
        except Exception as error:  # noqa: BLE001  # of torch's compilers: a call that was taken is never refused later
            why = str(error) if isinstance(error, RerollError) else f"{type(error).__name__}: {error}"
            self._stay(f"{why}. {CACHED}" if isinstance(error, OSError) else why)
            return None

    def _stay(self, why: str) -> None:
        self.stays, self.tried = True, None
        if self.options.proof == "always" and self.trials is not None:
            raise ProofError(why)
        warn(f"The loops go on with eager segments, since compiled ones cannot take over: {why}")

    def note(self, built: Sequence[Built]) -> None:
        """A call of these loops begins."""
        if self.options.start == "compiled" or is_aside() or not torch.is_grad_enabled():
            return
        if not any(each.kernels.traced.tangents for each in built):
            return
        self.spent.calls += 1
        if not self.compiled:
            self.before = _seconds(built)
            lasts = sum(map(self._lasts, built))
            if self.spent.calls == 1 and not self.stays:
                _tell_of_start(built, max(CALL, 2 + math.ceil(COMPILING / lasts)))
            self.spent.seconds += lasts
            self.own += lasts
            self._compile_ahead(built)
        elif self.took_over is not None:
            self.took_over += 1
            if self.took_over == _SETTLED:
                self._tell(built)

    def _lasts(self, built: Built) -> float:
        """Seconds that a training call of a loop takes by eager segments, about."""
        traced = built.kernels.traced
        if built.kernels not in self.lasting:
            self.lasting[built.kernels] = eager_seconds(traced.graph.graph) / traced.steps
        return self.lasting[built.kernels] * built.executable.recurrence.steps

    def _compile_ahead(self, built: Sequence[Built]) -> None:
        """Have another process compile what will take over, for a CPU. Where that cannot be, the takeover does, and
        says why."""
        if any(home_of(each.executable.recurrence.examples).type != "cpu" for each in built):
            return
        calls, seconds = _AHEAD
        with suppress(Exception):
            if self.ahead is not None:
                self.ahead.ask()
            elif self.prepare is not None and not self.begun:
                self.begun = self.spent.calls >= calls and self.spent.seconds >= seconds
                self.ahead = Ahead.begin(self.prepare) if self.begun else None

    def _tell(self, built: Sequence[Built]) -> None:
        """Say, once, what compiled segments have gained."""
        if (now := _seconds(built)) and self.before:
            tell(
                f"{_where(built)}: compiled segments run now, {self.before / now:.1f} times as fast as torch's kernels."
            )


def _tell_of_start(built: Sequence[Built], call: int) -> None:
    """Say, once, what runs, when that ends, and why it begins anew where the loops have been met before."""
    where, sizes = _where(built), ", ".join(map(_sizes, built))
    before, _MET[where] = _MET.get(where), sizes
    anew = "" if before in (None, sizes) else f" with states of {sizes} in place of {before}"
    how = "" if before else " start='compiled' compiles at the first call."
    tell(f"{where}{anew}: torch's kernels run at first, compiled segments from about training call {call:,} on.{how}")


def _sizes(built: Built) -> str:
    """The sizes of what a loop carries."""
    recurrence = built.executable.recurrence
    carries = recurrence.examples[: len(recurrence.carries)]
    return " and ".join(dict.fromkeys("x".join(map(str, each.shape)) or "1" for each in carries))


def _where(built: Sequence[Built]) -> str:
    return "the loop at " + " and ".join(dict.fromkeys(each.executable.recurrence.where for each in built))


def _seconds(built: Sequence[Built]) -> float | None:
    """Seconds of a step of some loops, forward and backward, at their last call; None before one has ended."""
    seconds = [each.executable.clock.seconds for each in built]
    known = [each for each in seconds if each is not None]
    steps = sum(each.executable.recurrence.steps for each in built)
    return sum(known) / steps if steps and len(known) == len(seconds) else None
