"""From compiled segments to an executable: choose a schedule, make and check the program that plays it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from torch import Tensor

from reroll.backends.codecs.codec import CODECS
from reroll.backends.construct.bytes import carry_gradients, footprint, output_gradients, recorded, turned_gradients
from reroll.backends.construct.kernels import Kernels, passes_of, results_of, store_all_root
from reroll.backends.construct.timing import with_transfers
from reroll.backends.runtime.executable import Compiled, Executable
from reroll.backends.runtime.recordings import Graphs
from reroll.backends.tiers.device import home_of
from reroll.backends.tiers.tier import STAGING, TIERS
from reroll.errors import BudgetError, RerollWarning
from reroll.passes import DEFAULT_PASSES
from reroll.planning.choice import Choice
from reroll.planning.choose import ALONE, Beside, Demand, choose
from reroll.planning.options import Options
from reroll.program.context import Context
from reroll.program.memory import Needs, Prediction, predict
from reroll.program.program import Program, store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes, Tally, count
from reroll.recurrence import Recurrence
from reroll.schedules.machine import pieces
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from reroll.segment.facts import kept_as


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An executable, and everything that led to it."""

    executable: Executable
    kernels: Kernels
    choice: Choice
    context: Context
    tally: Tally
    needs: Needs
    prediction: Prediction
    options: Options
    beside: Beside

    @property
    def program(self) -> Program:
        """The rewritten training program."""
        return self.executable.program

    @property
    def name(self) -> str:
        """The name of the recurrence."""
        return self.executable.recurrence.name

    @property
    def needed(self) -> int:
        """The least budget that leaves the recurrence what its plan is predicted to hold."""
        return self.beside.needed(self.prediction.peak)

    def moving(self, problem: Problem) -> Problem:
        """The problem with what it costs to move carries, as it was measured for this plan; else as if it were free."""
        known = self.choice.problem
        return replace(problem, room=known.room, write=known.write, read=known.read)

    def results(self) -> tuple[Tensor, ...]:
        """Examples of what the recurrence gives."""
        return results_of(self.executable.compiled.segments[self.choice.segment], self.executable.recurrence)


def plan(
    kernels: Kernels, recurrence: Recurrence, options: Options, beside: Beside = ALONE, earlier: Built | None = None
) -> Built:
    """Choose a schedule for a recurrence with compiled segments, and make the program that plays it.

    Segments are recorded, where that can be, if what recordings hold leaves enough of a budget. earlier: a plan with
    the same kernels, of which what was measured is taken; then nothing is allocated.
    """
    compiled = kernels.compiled
    if compiled.graphs.device is None:
        return _plan(kernels, recurrence, options, beside, earlier, compiled)
    try:
        return _plan(kernels, recurrence, options, beside, earlier, compiled)
    except BudgetError:
        return _plan(kernels, recurrence, options, beside, earlier, replace(compiled, graphs=Graphs(None)))


def _plan(
    kernels: Kernels,
    recurrence: Recurrence,
    options: Options,
    beside: Beside,
    earlier: Built | None,
    compiled: Compiled,
) -> Built:
    length = kernels.traced.steps
    recurrence = replace(recurrence, step=kernels.step, random=recurrence.random or kernels.random)
    alike = earlier is not None and earlier.executable.compiled.graphs.device is compiled.graphs.device
    needs = earlier.needs if earlier and alike else _needs(kernels, recurrence, compiled)
    context = Context(store_all_root(recurrence, length), recurrence, codec=options.codec, facts=kernels.facts)

    @lru_cache(maxsize=1)  # the last candidate is the one that is chosen
    def planned(schedule: str, problem: Problem, ahead: bool) -> tuple[Context, Program, Tally, Prediction]:
        under = replace(context, root=tree(schedule, problem), ahead=ahead)
        program = run(passes_of(options), store_all(problem.steps, problem.segment), under)
        return under, program, *cost(program, needs)

    demand = Demand(
        carry=needs.sizes.of_carry(tuple(kept_as(fact, options.codec) for fact in kernels.facts)),
        tape=needs.sizes.of_tape(0, length),
        scratch=needs.scratch,
        peak=lambda candidate: planned(candidate.schedule, candidate.problem, candidate.ahead)[-1].peak,
        replay=kernels.replay,
        waiting=(needs.staged + 1) * needs.carry,
        reversing=needs.reversing(length),
        moving=earlier.moving if earlier else partial(_moving, kernels, recurrence, options),
    )
    device = home_of(recurrence.examples).type
    choice = choose(recurrence.steps, length, options, device, demand, beside)
    context, program, tally, prediction = planned(choice.schedule, choice.problem, choice.ahead)
    own = [name for name in passes_of(options) if name in DEFAULT_PASSES]
    if own != list(DEFAULT_PASSES):
        usual = run(DEFAULT_PASSES, store_all(choice.steps, choice.segment), context)
        _warn_of_passes(own, choice, tally, count(usual, needs.sizes))
    tiers = {name: TIERS.find(name).make(options.spill_folder) for name in tally.tier_peaks}
    executable = Executable.of(recurrence, program, compiled, tiers=tiers, verify=options.verify)
    return Built(executable, kernels, choice, context, tally, needs, prediction, options, beside)


def _moving(kernels: Kernels, recurrence: Recurrence, options: Options, problem: Problem) -> Problem:
    """The problem with what it costs to move carries."""
    program = store_all(problem.steps, problem.segment)
    executable = Executable.of(recurrence, program, kernels.compiled)
    return with_transfers(problem, executable, options.spill_folder)


def _warn_of_passes(own: Sequence[str], choice: Choice, found: Tally, usual: Tally) -> None:
    """Warn where those of reroll's passes that were given do not play the schedule; ``usual``: what all of them do."""
    if _played(found) == _played(usual):
        return
    (again, written), (usually_again, usually_written) = _played(found), _played(usual)
    missing = ", ".join(name for name in DEFAULT_PASSES if name not in own)
    warnings.warn(
        f"The passes that were given do not play {choice.describe()}: they run {again:,} of {choice.steps:,} steps "
        f"again instead of {usually_again:,}, and move {written:,} carries off instead of {usually_written:,}. "
        + (f"Left out are: {missing}. " if missing else "Their order is another one than reroll's. ")
        + "Name those of reroll.DEFAULT_PASSES, in that order, and yours among them.",
        RerollWarning,
        stacklevel=2,
    )


def _played(tally: Tally) -> tuple[int, int]:
    """Steps that are run again, and carries that are moved off."""
    return tally.reforward_steps, tally.carries_written


def cost(program: Program, needs: Needs) -> tuple[Tally, Prediction]:
    """What a program takes that passes made, who left it checked: its tally in bytes, and its predicted peak."""
    tally = count(program, needs.sizes)
    return tally, predict(tally, needs)


def _needs(kernels: Kernels, recurrence: Recurrence, compiled: Compiled) -> Needs:
    """Bytes of carries and tapes as they are kept, and of what the segments and their recordings need besides."""
    traced, segments, once = kernels.traced, compiled.segments, compiled.once.nbytes
    values, length = traced.results[: traced.carries], traced.steps
    plain = sum(value.numel() * value.element_size() for value in values)
    held = once + turned_gradients(segments[length], recurrence)
    if compiled.graphs.device is not None:
        held += once + recorded(segments.values(), recurrence)
    footprints = {k: footprint(each, traced.carries, held) for k, each in segments.items()}

    def packed(codec: tuple[str, ...]) -> int:
        if not codec:
            return plain
        return sum(
            CODECS.find(name).nbytes(value.numel(), value.dtype) for value, name in zip(values, codec, strict=True)
        )

    def taped(start: int, stop: int) -> int:
        return sum(footprints[k].saved * count for k, count in pieces(stop - start, segments))

    return Needs(
        segments=footprints,
        sizes=Sizes(carry=plain, packed=packed, taped=taped),
        carry=plain,
        grads=carry_gradients(segments[length], traced.carries),
        output_grads=output_gradients(segments[length], traced.carries, recurrence.steps),
        staged=STAGING,
    )
