"""From the recurrences of a graph to plans that meet a budget together.

Recurrences that differ in their operands only share their kernels: chunks of a long sequence, equal layers. Which
lengths of segments are compiled, and what each recurrence gets of the budget, is decided here, no more than the machine
has.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch

from reroll.backends.construct import kernels as compiling
from reroll.backends.construct.budget_allocation import Share, share_out
from reroll.backends.construct.kernels import PACKING, Kernels, Results, kind, made_by, packs, results_of
from reroll.backends.construct.lent import kernels_for
from reroll.backends.construct.plan import Built, plan
from reroll.backends.runtime.undefined_grads import own_functions
from reroll.backends.tiers.available import free_bytes, total_bytes
from reroll.backends.tiers.device import home_of
from reroll.errors import BudgetError, OptionError, warn
from reroll.passes import DEFAULT_PASSES
from reroll.planning.choice import Choice, steps_run
from reroll.planning.choose import ALONE, BudgetContext
from reroll.planning.options import Options, parse_budget
from reroll.planning.segments import lengths_of, segment_length, segment_lengths
from reroll.program.memory import NOTHING, OuterMemory
from reroll.recurrence import Recurrence
from reroll.words.units import nbytes_text

BytesAround = Callable[[Mapping[str, Results]], Mapping[str, OuterMemory]]
"""From what recurrences give, by their names, to the bytes that their graph holds around each of them."""
SHARE = 0.8  # of what is free, for an automatic budget: gradients and the optimizer's state come later
_WORTHWHILE = 0.9  # of the steps that are run now: shorter segments are compiled if they may come below
_KNOWN = 64  # kinds of kernels that are held, those used last
_UNPACKED = 1.2  # times the steps that are run, where products read weights as they lie
Made = TypeVar("Made")
LOG = logging.getLogger(__name__)
KernelsOf = Callable[[int, Options], Kernels]
"""Segments of which most have a length, by the passes of some options."""


class Known:
    """Kernels that were made before, by what they depend on (``kind``, ``made_by``), the last ones.

    Those of one graph share them, and those of one model at several lengths: then the ``Conditions`` are told, too.
    """

    def __init__(self) -> None:
        self._made = OrderedDict[Any, list[Kernels]]()
        self._closed = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nothing is made: what is not known is an UnknownError."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False

    def kernels(
        self, what: Any, recurrence: Recurrence, lengths: Sequence[int], loops: int, options: Options
    ) -> Kernels:
        """Segments of some lengths, longest first, of one of so many loops. ``what``: all that they depend on beside
        options. Raises NotLentError, UnknownError."""
        key = what, made_by(options)
        made = self._made.get(key, [])
        for each in made:
            if set(lengths) <= set(each.compiled.segments):
                self._made.move_to_end(key)
                return each
        if self._closed:
            raise UnknownError
        traced = {each.traced.steps: each.traced for each in made if each.traced.tangents}  # others are cut in place
        found = kernels_for(recurrence, options, lengths, loops, traced)
        self._made[key] = [found, *made]
        self._made.move_to_end(key)
        if len(self._made) > _KNOWN:
            self._made.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class Conditions:
    """What kernels depend on beside steps and options: ``settings`` of torch; ``held``: all that functions of the
    user's own may read, such as a slope that a gradient has."""

    settings: Any = None
    held: Any = None

    def of(self, recurrence: Recurrence) -> Any:
        """What those of a recurrence depend on."""
        return self.settings, self.held if own_functions(recurrence.step) else None


class UnknownError(Exception):
    """No kernels are known for a loop."""


def build_all(
    recurrences: Sequence[Recurrence],
    options: Options,
    around: BytesAround,
    known: Known | None = None,
    conditions: Conditions | None = None,
) -> list[Built]:
    """Compile recurrences as the options say, each kind of kernel once; none that is ``known``."""
    find, loops = (Known() if known is None else known).kernels, len(recurrences)

    @cache
    def depends(recurrence: Recurrence, steps: int) -> Any:
        return kind(recurrence, steps), (Conditions() if conditions is None else conditions).of(recurrence)

    def kernels(recurrence: Recurrence, length: int, way: Options) -> Kernels:
        lengths = lengths_of(recurrence, length, way)
        compiled = partial(find, depends(recurrence, lengths[0]), recurrence, lengths, loops)
        return compiling.select_kernels(compiled, recurrence.steps, way, loops)

    return fitting_all([partial(kernels, each) for each in recurrences], recurrences, options, around)


def compile_usual(recurrences: Iterable[Recurrence], options: Options, loops: int) -> None:
    """Compile segments of the usual length of some of so many loops, where these have steps."""
    for each in recurrences:
        if each.steps:
            lengths = lengths_of(each, segment_length(each, options), options)
            compiling.compile_kernels(each, options, lengths, loops)


def build(recurrence: Recurrence, options: Options) -> Built:
    """Compile a recurrence as the options say. Raises BudgetError if no length of segments fits the memory budget."""
    return build_all([recurrence], options, lambda _: {})[0]


def fitting_all(
    kernels_of: Sequence[KernelsOf],
    recurrences: Sequence[Recurrence],
    options: Options,
    around: BytesAround,
) -> list[Built]:
    """The plans of the recurrences of one graph, which share a budget with each other and with what is around them.

    Only the kernels of these plans are built: inductor's text says what others need. Raises BudgetError if no plans
    meet it.
    """
    built = _fitting_all(kernels_of, recurrences, options, around)
    compiling.build_kernels([each.executable for each in built])
    return built


def _fitting_all(
    kernels_of: Sequence[KernelsOf], recurrences: Sequence[Recurrence], options: Options, around: BytesAround
) -> list[Built]:
    pairs = list(zip(kernels_of, recurrences, strict=True))
    if not pairs or options.memory_budget is None:
        return [_fitting(kernels, each, options, ALONE) for kernels, each in pairs]
    options = within_machine(options, home_of(recurrences[0].examples))
    results = {}
    for kernels, each in pairs:
        length = segment_lengths(each, options)[0]
        results[each.name] = results_of(kernels(length, options).compiled.segments[length], each)
    held, own = around(results), None
    if options.automatic_budget and torch.is_grad_enabled():  # else nothing is kept, whatever the plan
        own = automatic_budget(recurrences[0])
    budget = parse_budget(options.memory_budget) if own is None else own
    if len(pairs) == 1 or budget is None:
        return [
            _fitting(kernels, each, options, BudgetContext(held.get(each.name, NOTHING), 0, own))
            for kernels, each in pairs
        ]
    return _shared_out(pairs, options, budget, held)


def _shared_out(
    pairs: Sequence[tuple[KernelsOf, Recurrence]],
    options: Options,
    budget: int | float,
    held: Mapping[str, OuterMemory],
) -> list[Built]:
    """The plans of several recurrences: with packed weights, or if these do not fit without. Raises BudgetError."""
    packed = any(_packed(kernels_of, each, options) for kernels_of, each in pairs)

    def shared(way: Options) -> list[Built]:
        return share_out([_share(*pair, way, held.get(pair[1].name, NOTHING)) for pair in pairs], way, budget)

    return _first_that_fits(_or_replayed(_ways(options) if packed else [options], pairs), shared)


def _first_that_fits(ways: Iterable[Options], made: Callable[[Options], Made]) -> Made:
    """What is made by the first way that fits a budget. Raises the BudgetError of that which needs the least."""
    refusals = []
    for way in ways:
        try:
            return made(way)
        except BudgetError as error:
            refusals.append(error)
    raise min(refusals, key=lambda error: error.nbytes)


def _or_replayed(ways: Sequence[Options], pairs: Sequence[tuple[KernelsOf, Recurrence]]) -> Iterator[Options]:
    """Some ways, then the same with replayed products, where it seemed that none need be."""
    yield from ways
    if any(_may_replay(kernels_of, each, ways[0]) for kernels_of, each in pairs):
        yield from (replace(way, replay=True) for way in ways)


def _ways(options: Options) -> list[Options]:
    """The options, and where memory is bounded and no passes were asked for, those without packed weights."""
    if options.passes is not None or options.memory_budget is None or options.lowering != "inductor":
        return [options]
    return [options, replace(options, passes=tuple(each for each in DEFAULT_PASSES if each != PACKING))]


def _share(kernels_of: KernelsOf, recurrence: Recurrence, options: Options, around: OuterMemory) -> Share:
    def within(length: int, nbytes: int) -> Built:
        return plan(kernels_of(length, options), recurrence, options, BudgetContext(budget=nbytes))

    return Share(segment_lengths(recurrence, options), around, within)


def automatic_budget(recurrence: Recurrence) -> int:
    """Bytes for ``memory_budget="auto"``: most of what is free now where the recurrence runs.

    Raises OptionError where the system does not say it.
    """
    device = home_of(recurrence.examples)
    free = free_bytes(device)
    if free is None:
        raise OptionError(
            f"memory_budget='auto' asks what is free on {device}, which this system does not say. Give bytes."
        )
    return max(int(SHARE * free), 1)


def _fitting(kernels_of: KernelsOf, recurrence: Recurrence, options: Options, beside: BudgetContext) -> Built:
    """The fastest plan within the budget, of which what is ``beside`` the recurrence takes its share."""
    ways = _or_replayed([options], [(kernels_of, recurrence)])
    return _first_that_fits(ways, lambda way: _fastest(kernels_of, recurrence, way, beside))


def _fastest(kernels_of: KernelsOf, recurrence: Recurrence, options: Options, beside: BudgetContext) -> Built:
    """The fastest plan within the budget.

    Segments of the usual length with packed weights are compiled first. Weights that are not packed, and shorter
    segments, come where nothing fits, or where they may run a tenth less. Raises BudgetError if nothing fits.
    """
    best: Built | None = None
    refusals = []
    lengths, packed = segment_lengths(recurrence, options), _packed(kernels_of, recurrence, options)
    for length, way in ((length, way) for length in lengths for way in (_ways(options) if packed else [options])):
        if best is not None and not _may_be_faster(best, length, way, packed):
            continue
        try:
            built = plan(kernels_of(length, way), recurrence, way, beside)
        except BudgetError as error:
            LOG.debug("segments of %d steps do not fit the budget: %s", length, error)
            refusals.append(error)
            continue
        LOG.debug("could be %s: %.0f runs of a step", built.choice.describe(), _cost(built.choice, way))
        if best is None or _cost(built.choice, way) < _cost(best.choice, best.options):
            best = built
    if best is None:
        raise min(refusals, key=lambda error: error.nbytes)
    return best


def _cost(choice: Choice, way: Options) -> float:
    """The time of a choice, in runs of a step with packed weights."""
    return steps_run(choice) * (1 if packs(way) else _UNPACKED)


def _packed(kernels_of: KernelsOf, recurrence: Recurrence, options: Options) -> int:
    """Bytes of the packed weights of a recurrence, if they may be left out."""
    if len(_ways(options)) == 1:
        return 0
    return kernels_of(segment_lengths(recurrence, options)[0], options).compiled.once.packed


def _may_replay(kernels_of: KernelsOf, recurrence: Recurrence, options: Options) -> bool:
    """Whether products are not replayed, which the planner chose, and could be."""
    kernels = kernels_of(segment_lengths(recurrence, options)[0], options)
    return options.replay == "auto" and kernels.replaying is not None and not kernels.replay


def _may_be_faster(built: Built, length: int, way: Options, packed: int) -> bool:
    """Whether segments of ``length`` steps, if their tapes and scratch are as much smaller, run a tenth less, or those
    that hold no ``packed`` bytes of weights do."""
    choice, needs = built.choice, built.demand.needs
    if built.options.schedule == "auto" and choice.schedule == "remote":
        return True  # there was next to no room to keep carries
    if choice.problem.memory is None or (choice.extra_runs == 0 and packs(built.options) >= packs(way)):
        return False
    shorter = length / choice.segment
    scratch = needs.scratch - needs.handed - needs.grads
    freed = packed * (packs(built.options) - packs(way))
    problem = replace(
        choice.problem,
        segment=length,
        tape=max(int(choice.problem.tape * shorter), 1),
        memory=choice.problem.memory + int((scratch - packed * packs(built.options)) * (1 - shorter)) + freed,
        write=choice.problem.write / shorter,
        read=choice.problem.read / shorter,
    )
    try:
        return _cost(Choice(choice.schedule, problem), way) < _WORTHWHILE * _cost(choice, built.options)
    except BudgetError:  # so little would be left for carries
        return False


def within_machine(options: Options, device: torch.device) -> Options:
    """The options with a budget of no more bytes than the device has in total.

    A RerollWarning says so where the budget is larger than that, or than what is free now. Fractions stay as they are.
    """
    budget = parse_budget(options.memory_budget)
    if not isinstance(budget, int):
        return options
    free, total = free_bytes(device), total_bytes(device)
    asked = f"memory_budget={options.memory_budget!r} ({nbytes_text(budget)})"
    if total is not None and budget > total:
        text = f"{asked} is more than the {nbytes_text(total)} of memory that this machine has. The plan keeps to that."
        warn(text)
        return replace(options, memory_budget=total)
    if free is not None and budget > free:
        text = (
            f"{asked} is more than the {nbytes_text(free)} of memory that are free now. The plan keeps to the budget, "
            "so it may need memory that others hold. Give a smaller budget."
        )
        warn(text)
    return options
