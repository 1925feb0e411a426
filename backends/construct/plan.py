"""From compiled segments to an executable: choose a schedule, make and check the program that plays it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from reroll.backends.construct.bytes import needs_of
from reroll.backends.construct.kernels import Kernels, Results, passes_of, results_of, store_all_root
from reroll.backends.construct.timing import waits_for_launches, with_transfers, with_transfers_of
from reroll.backends.runtime.executable import Compiled, Executable
from reroll.backends.runtime.recordings import Graphs
from reroll.backends.tiers.device import home_of
from reroll.backends.tiers.tier import TIERS
from reroll.errors import BudgetError, warn
from reroll.passes import DEFAULT_PASSES
from reroll.planning.choice import Choice
from reroll.planning.choose import ALONE, BudgetContext, choose
from reroll.planning.options import Options
from reroll.planning.plan import Demand, Plan
from reroll.planning.truncation import cuts_of
from reroll.program.registry import find as find_pass
from reroll.recurrence import Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An executable, and everything that led to it."""

    executable: Executable
    kernels: Kernels
    plan: Plan
    demand: Demand
    options: Options
    beside: BudgetContext

    @property
    def choice(self) -> Choice:
        """The schedule with its numbers."""
        return self.plan.choice

    @property
    def name(self) -> str:
        """The name of the recurrence."""
        return self.executable.recurrence.name

    @property
    def needed(self) -> int:
        """The least budget that leaves the recurrence what its plan is predicted to hold."""
        return self.beside.needed(self.plan.prediction)

    def results(self) -> Results:
        """Examples of what the recurrence gives."""
        return results_of(self.executable.compiled.segments[self.choice.segment], self.executable.recurrence)


def plan(
    kernels: Kernels,
    recurrence: Recurrence,
    options: Options,
    beside: BudgetContext = ALONE,
    earlier: Built | None = None,
) -> Built:
    """Choose a schedule for a recurrence with compiled segments, and make the program that plays it.

    Segments are recorded, where that can be and gains time, if what recordings hold leaves enough of a budget. earlier:
    a plan with the same kernels, of which what was measured is taken; then nothing is allocated.
    """
    compiled = kernels.compiled
    plain = replace(compiled, graphs=Graphs(None))
    if not _records(kernels, recurrence):
        return _plan(kernels, recurrence, options, beside, earlier, plain)
    try:
        return _plan(kernels, recurrence, options, beside, earlier, compiled)
    except BudgetError:
        return _plan(kernels, recurrence, options, beside, earlier, plain)


def _records(kernels: Kernels, recurrence: Recurrence) -> bool:
    """Whether there is a device that records segments, and they are worth it; that is found out once."""
    graphs = kernels.compiled.graphs
    if graphs.device is not None and graphs.worthwhile is None:
        graphs.worthwhile = waits_for_launches(kernels, recurrence, graphs.device)
    return bool(graphs.worthwhile)


def _plan(
    kernels: Kernels,
    recurrence: Recurrence,
    options: Options,
    beside: BudgetContext,
    earlier: Built | None,
    compiled: Compiled,
) -> Built:
    cuts = cuts_of(recurrence, options.truncate)
    random = recurrence.random or kernels.random
    recurrence = replace(recurrence, step=kernels.step, random=random, numbers_on=kernels.numbers_on)
    demand = _demand(kernels, recurrence, options, earlier, compiled.graphs)
    chosen = choose(demand, options, beside)
    _warn_of_passes(chosen, demand)
    tiers = {name: TIERS.find(name).make(options.spill_folder) for name in chosen.tally.tier_peaks}
    executable = Executable.of(recurrence, chosen.program, compiled, tiers=tiers, verify=options.verify, cuts=cuts)
    return Built(executable, kernels, chosen, demand, options, beside)


def _demand(
    kernels: Kernels, recurrence: Recurrence, options: Options, earlier: Built | None, graphs: Graphs
) -> Demand:
    """What is known of a recurrence with compiled segments; ``graphs`` records them, where a device can do that."""
    alike = earlier is not None and earlier.executable.compiled.graphs.device is graphs.device
    root = store_all_root(recurrence, kernels.traced.steps)
    measure = partial(with_transfers, kernels=kernels, recurrence=recurrence, folder=options.spill_folder)
    return Demand(
        context=replace(kernels.context, root=root, recurrence=recurrence),
        needs=earlier.demand.needs if earlier and alike else needs_of(kernels, recurrence, device=graphs.device),
        passes=passes_of(options),
        device=home_of(recurrence.examples).type,
        replay=kernels.replay,
        thin=_thin(kernels) if graphs.device is None else None,  # their reversal is not recorded
        moving=partial(with_transfers_of, known=earlier.choice.problem) if earlier else measure,
    )


def _thin(kernels: Kernels) -> tuple[float, float] | None:
    """What the reversal of a thin tape repeats, and what a run for a tape alone takes, where all segments have such."""
    tapes = [segment.thin for segment in kernels.compiled.segments.values()]
    longest = kernels.compiled.segments[kernels.traced.steps].thin
    return (longest.repeats, longest.alone) if longest and all(tapes) else None


def _warn_of_passes(plan: Plan, demand: Demand) -> None:
    """Warn where those of reroll's passes that were given do not play the schedule as all of them do."""
    every = [name for name in DEFAULT_PASSES if find_pass(name).on == "program"]
    own = [name for name in demand.passes if name in every]
    if own == every:
        return
    choice = plan.choice
    usual = replace(demand, passes=DEFAULT_PASSES).plan(choice)
    (again, written), (usually_again, usually_written) = _played(plan), _played(usual)
    if (again, written) == (usually_again, usually_written):
        return
    missing = ", ".join(name for name in every if name not in own)
    warn(
        f"The passes that were given do not play {choice.describe()}: they run {again:,} of {choice.steps:,} steps "
        f"again instead of {usually_again:,}, and move {written:,} carries off instead of {usually_written:,}. "
        + (f"Left out are: {missing}. " if missing else "Their order is another one than reroll's. ")
        + "Name those of reroll.DEFAULT_PASSES, in that order, and yours among them.",
    )


def _played(plan: Plan) -> tuple[int, int]:
    """Steps that are run again, and carries that are moved off."""
    return plan.tally.reforward_steps, plan.tally.carries_written
