"""From a recurrence to an executable: trace and compile segments, choose a schedule, build and check the program."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from torch import Tensor, fx

from reroll.backends.tiers.disk import DiskTier
from reroll.backends.inductor.event_counts import Watch
from reroll.backends.runtime.executable import Executable
from reroll.backends.build.bytes import carry_gradients, footprint, output_gradients, recorded, turned_gradients
from reroll.backends.runtime.recordings import Graphs
from reroll.backends.tiers.host import HostTier
from reroll.backends.inductor.lower import Segment, has_vectors, lower, prepare, replays
from reroll.segment.invariants import Once
from reroll.backends.progress import progress
from reroll.backends.tiers.tier import STAGING, Tier
from reroll.backends.tiers.device import background_of, home_of
from reroll.backends.build.timing import with_transfers
from reroll.backends.processes.together import groups_of
from reroll.segment.trace import Traced, constant_names, trace
from reroll.backends.runtime.values import expected_nbytes
from reroll.planning.choice import Choice
from reroll.program.context import Context
from reroll.errors import BudgetError, RerollWarning
from reroll.segment.facts import kept_as
from reroll.graph.names import show_names
from reroll.options import Options
from reroll.passes import DEFAULT_PASSES
from reroll.planning.choose import ALONE, Beside, Demand, choose
from reroll.segment.policy import Policy
from reroll.program.memory import Needs, Prediction, predict
from reroll.program.program import Program, pieces, store_all
from reroll.recurrence import Recurrence
from reroll.program.registry import pass_names, run, run_on_half, run_on_step
from reroll.schedules.interval import Interval
from reroll.schedules.named import Problem, tree
from reroll.segment.sparsity import Fact
from reroll.program.tally import Sizes, Tally, count


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
        return results_of(self.executable.segments[self.choice.segment], self.executable.recurrence)


def results_of(segment: Segment, recurrence: Recurrence) -> tuple[Tensor, ...]:
    """Examples of what a recurrence gives: the last carry, and the outputs of all steps, stacked."""
    carries = len(recurrence.carries)
    rows = [like.new_empty((recurrence.steps, *like.shape[1:])) for like in segment.output_examples[carries:]]
    return (*segment.output_examples[:carries], *rows)


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The compiled segments of a recurrence, the longest first, and what was proved of its carry.

    ``replay``: their backwards repeat products from what is kept of spikes. ``watch`` counts their event products;
    ``once`` makes what they need once per call; ``graphs`` records them, where a device can do that.
    """

    traced: Traced
    segments: Mapping[int, Segment]
    facts: tuple[Fact, ...]
    step: fx.GraphModule
    replay: bool
    watch: Watch
    once: Once
    graphs: Graphs

    @property
    def random(self) -> bool:
        """Whether a step draws random numbers."""
        return self.traced.random


def compile_kernels(recurrence: Recurrence, options: Options, lengths: Sequence[int]) -> Kernels:
    """Segments of the given lengths, longest first, whatever the number of steps of the recurrence."""
    context = Context(store_all_root(recurrence, lengths[0]), recurrence, codec=options.codec)
    recurrence = replace(recurrence, step=run_on_step(passes_of(options), recurrence.step, context))
    policy = options.policy(recurrence.where)
    shown = replace(recurrence, step=show_names(recurrence.step)) if policy else recurrence
    traced = {k: trace(shown, k, decompose=options.lowering == "inductor") for k in lengths}
    facts = traced[lengths[0]].facts() if options.codec != "none" else ()
    for each in traced.values():
        prepare(each, options.lowering)
    replay, watch = _replays(traced[lengths[0]], options, policy), Watch()
    once = Once(constant_names(recurrence))
    vectors = has_vectors(options.lowering, home_of(recurrence.examples))
    context = replace(context, facts=facts, lowering=options.lowering, vectors=vectors)
    lowered = partial(
        lower,
        lowering=options.lowering,
        codec=options.codec,
        policy=policy,
        replay=replay,
        rewrite=partial(run_on_half, passes_of(options), context=context),
        watch=watch,
        once=once,
    )
    with progress(f"compiling segments of {' and '.join(map(str, lengths))} steps of the loop at {recurrence.where}"):
        segments = {k: lowered(each) for k, each in traced.items()}
    recordable = options.cuda_graphs and not groups_of(recurrence.step)  # collectives are launched one by one
    device = background_of(recurrence.examples) if recordable else None
    graphs = Graphs(device, recurrence.where, traced[lengths[0]].random)
    return Kernels(traced[lengths[0]], segments, facts, recurrence.step, replay, watch, once, graphs)


def _replays(traced: Traced, options: Options, policy: Policy) -> bool:
    """Whether backwards repeat products.

    As asked for, else if a tape of all steps is small then and no schedule that runs steps again was asked for.
    """
    if isinstance(options.replay, bool):
        return options.replay
    return options.schedule in ("auto", "store_all") and replays(traced, options.lowering, options.codec, policy)


def passes_of(options: Options) -> tuple[str, ...]:
    """The names of the passes to run, in order."""
    return DEFAULT_PASSES if options.passes is None else pass_names(options.passes)


def plan(
    kernels: Kernels, recurrence: Recurrence, options: Options, beside: Beside = ALONE, earlier: Built | None = None
) -> Built:
    """Choose a schedule for a recurrence with compiled segments, and make the program that plays it.

    Segments are recorded, where that can be, if what recordings hold leaves enough of a budget. earlier: a plan with
    the same kernels, of which what was measured is taken; then nothing is allocated.
    """
    if kernels.graphs.device is None:
        return _plan(kernels, recurrence, options, beside, earlier, kernels.graphs)
    try:
        return _plan(kernels, recurrence, options, beside, earlier, kernels.graphs)
    except BudgetError:
        return _plan(kernels, recurrence, options, beside, earlier, Graphs(None))


def _plan(
    kernels: Kernels, recurrence: Recurrence, options: Options, beside: Beside, earlier: Built | None, graphs: Graphs
) -> Built:
    length = kernels.traced.steps
    recurrence = replace(recurrence, step=kernels.step, random=recurrence.random or kernels.random)
    alike = earlier is not None and earlier.executable.graphs.device is graphs.device
    needs = earlier.needs if earlier and alike else _needs(kernels, recurrence, graphs)
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
    tiers = _tiers(program, tally, options)
    executable = Executable.of(
        recurrence, program, kernels.segments, tiers, options.verify, kernels.watch, kernels.once, graphs
    )
    return Built(executable, kernels, choice, context, tally, needs, prediction, options, beside)


def _moving(kernels: Kernels, recurrence: Recurrence, options: Options, problem: Problem) -> Problem:
    """The problem with what it costs to move carries."""
    program = store_all(problem.steps, problem.segment)
    executable = Executable.of(
        recurrence, program, kernels.segments, {}, False, kernels.watch, kernels.once, kernels.graphs
    )
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
    return tally, predict(program, tally, needs)


def store_all_root(recurrence: Recurrence, segment: int) -> Interval:
    """The tree of plain BPTT, which stands until a schedule is chosen."""
    return tree("store_all", Problem(recurrence.steps, segment))


def lengths_of(recurrence: Recurrence, length: int) -> tuple[int, ...]:
    """The lengths of the segments of a recurrence, if most are of this length."""
    rest = recurrence.steps % length
    return (length, rest) if rest else (length,)


def _needs(kernels: Kernels, recurrence: Recurrence, graphs: Graphs) -> Needs:
    """Bytes of carries and tapes as they are kept, and of what the segments and their recordings need besides."""
    traced, segments = kernels.traced, kernels.segments
    values, length = traced.results[: traced.carries], traced.steps
    plain = sum(value.numel() * value.element_size() for value in values)
    held = kernels.once.nbytes + turned_gradients(segments[length], recurrence)
    if graphs.device is not None:
        held += kernels.once.nbytes + recorded(segments.values(), recurrence)
    footprints = {k: footprint(each, traced.carries, held) for k, each in segments.items()}

    def packed(codec: tuple[str, ...]) -> int:
        if not codec:
            return plain
        return sum(expected_nbytes(value, name) for value, name in zip(values, codec, strict=True))

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


def _tiers(program: Program, tally: Tally, options: Options) -> dict[str, Tier]:
    names = {name for name in tally.tier_peaks if name not in ("local", "remote")}
    made: dict[str, Tier] = {}
    if "disk" in names:
        made["disk"] = DiskTier(options.spill_folder)
    if "host" in names:
        made["host"] = HostTier()
    return made
