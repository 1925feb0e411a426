"""From what is known of a recurrence, and a choice, to a plan: the program that plays it, and what that holds.

Nothing here is compiled, and nothing is measured: sizes come in as ``Needs``, seconds through ``Demand.moving``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from reroll.planning.choice import OPTIMAL, Choice, Thinning
from reroll.program.context import Context
from reroll.program.memory import Needs, Prediction, predict
from reroll.program.program import Program, store_all
from reroll.program.registry import run
from reroll.program.tally import Tally, count
from reroll.schedules.counts import counted
from reroll.schedules.problem import Problem
from reroll.segment.facts import kept_as


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How one recurrence is trained, and what that takes.

    ``choice`` is the schedule with its numbers, in steps and bytes, ``context`` what the passes were told, ``program``
    the checked program that they made of it. ``tally`` counts what the program holds of carries and tapes, in bytes,
    what it moves, in carries and transfers, and what it runs, in steps. ``prediction`` is its local peak in bytes, with
    what the segments work with.
    """

    choice: Choice
    context: Context
    program: Program
    tally: Tally
    prediction: Prediction

    def within(self, allowed: int) -> Plan:
        """The same, with the local bytes that it had to meet."""
        return replace(self, choice=replace(self.choice, allowed=allowed))


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What is known of a recurrence when it is planned.

    ``context`` is what passes are told, in which a choice decides the tree and ``ahead``; ``needs`` are the bytes of
    its segments, ``passes`` those to run, by name, in order. ``device``: the type of the device, such as "cpu".
    ``replay``: tapes are so small that no step need run again. ``thin``: what the reversal of a thin tape repeats, and
    what a run for a tape alone takes, as parts of a run, where tapes may be thin. ``moving``: gives a problem what it
    costs to move carries, which is asked for only where they may move.
    """

    context: Context
    needs: Needs
    passes: tuple[str, ...]
    device: str = "cpu"
    replay: bool = False
    thin: tuple[float, float] | None = None
    moving: Callable[[Problem], Problem] = lambda problem: problem

    @property
    def steps(self) -> int:
        """Steps of the recurrence."""
        return self.context.root.steps

    @property
    def segment(self) -> int:
        """Steps of a whole segment."""
        return max(self.needs.segments)

    @property
    def carry(self) -> int:
        """Bytes of a carry as it is kept."""
        return self.needs.sizes.of_carry(tuple(kept_as(fact, self.context.codec) for fact in self.context.facts))

    @property
    def tape(self) -> int:
        """Bytes of the tape of a whole segment."""
        return self.needs.sizes.of_tape(0, self.segment)

    def thinning(self) -> Thinning | None:
        """What thin tapes would change. Their reversal is compiled when this is asked for first."""
        if self.thin is None:
            return None
        return Thinning(self._thin_tape, self.needs.scratch_of(thin=True) - self.needs.scratch, *self.thin)

    @property
    def _thin_tape(self) -> int:
        """Bytes of the thin tape of a whole segment."""
        return max(self.needs.sizes.of_tape(0, self.segment, thin=True), 1)

    @property
    def waiting(self) -> int:
        """Bytes of carries that wait to be written, or were read ahead."""
        return (self.needs.staged + 1) * self.needs.carry

    def bound(self, choice: Choice) -> int:
        """Bytes that a choice needs at least, without its program: some tape is complete when its backward begins."""
        if choice.schedule in OPTIMAL:
            return 0  # made for the memory that there is
        problem = choice.problem
        short = problem.tape if problem.steps % problem.segment else 0  # whose share of a tape is not exact
        if choice.thin:
            thin = -(-choice.thin // problem.segment)
            return (problem.segments - thin) * problem.tape + thin * self._thin_tape - short - self.needs.added
        working = self.needs.reversing(self.segment) - self.needs.added
        return counted(choice.root, problem).local_peak + working - problem.carry - short

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice: its program, made by the passes, and what it takes. Raises PassError."""
        context = replace(self.context, root=choice.root, ahead=choice.ahead)
        program = run(self.passes, store_all(choice.steps, choice.segment), context)
        tally = count(program, self.needs.sizes)
        return Plan(choice, context, program, tally, predict(tally, self.needs))
