"""From recurrences to plans that meet a budget together: which segments are compiled, and what each gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reroll.backends.tiers.available import free_bytes
from reroll.backends.build.budgets import within_machine
from reroll.backends.build.plan import Built, Kernels, compile_kernels, lengths_of, plan, results_of
from reroll.backends.tiers.device import home_of
from reroll.planning.choice import Choice, steps_run
from reroll.errors import BudgetError, OptionError
from reroll.options import Options
from reroll.planning.choose import ALONE, Beside, segment_lengths
from reroll.recurrence import Recurrence

SHARE = 0.8  # of what is free, for an automatic budget: gradients and the optimizer's state come later
_WORTHWHILE = 0.9  # of the steps that are run now: shorter segments are compiled if they may come below


def build(recurrence: Recurrence, options: Options) -> Built:
    """Compile a recurrence as the options say. Raises BudgetError if no length of segments fits the memory budget."""

    def kernels(length: int) -> Kernels:
        return compile_kernels(recurrence, options, lengths_of(recurrence, length))

    return fitting_all([kernels], [recurrence], options, lambda _: ALONE)[0]


def fitting_all(
    kernels_of: Sequence[Callable[[int], Kernels]],
    recurrences: Sequence[Recurrence],
    options: Options,
    beside: Callable[[Mapping[str, tuple[Tensor, ...]]], Beside],
) -> list[Built]:
    """The plans of the recurrences of one graph, which share a budget with each other and with what is beside them.

    beside: from what the recurrences give, by their names. Raises BudgetError if a recurrence does not get enough.
    """
    shares, pairs = ALONE, list(zip(kernels_of, recurrences, strict=True))
    options = within_machine(options, home_of(recurrences[0].examples)) if pairs else options
    if options.memory_budget is not None and pairs:
        results = {}
        for kernels, each in pairs:
            length = segment_lengths(each, options)[0]
            results[each.name] = results_of(kernels(length).segments[length], each)
        shares = beside(results)
    if options.automatic_budget and pairs and torch.is_grad_enabled():  # else nothing is kept, whatever the plan
        shares = replace(shares, budget=automatic_budget(recurrences[0]))
    return [_fitting(kernels, each, options, shares) for kernels, each in pairs]


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


def _fitting(kernels_of: Callable[[int], Kernels], recurrence: Recurrence, options: Options, beside: Beside) -> Built:
    """The fastest plan within the budget, of which what is ``beside`` the recurrence takes its share.

    Segments of the usual length are compiled first, and shorter ones where nothing fits, or where they may run a tenth
    less. Raises BudgetError if no length fits.
    """
    best: Built | None = None
    refusals = []
    for length in segment_lengths(recurrence, options):
        if best is not None and not _may_be_faster(best, length, options):
            continue
        try:
            built = plan(kernels_of(length), recurrence, options, beside)
        except BudgetError as error:
            refusals.append(error)
            continue
        if best is None or steps_run(built.choice) < steps_run(best.choice):
            best = built
    if best is None:
        raise min(refusals, key=lambda error: error.nbytes)
    return best


def _may_be_faster(built: Built, length: int, options: Options) -> bool:
    """Whether segments of ``length`` steps, if their tapes and scratch are as much smaller, run a tenth less."""
    choice, needs = built.choice, built.needs
    if options.schedule == "auto" and choice.schedule == "remote":
        return True  # there was next to no room to keep carries
    if choice.problem.memory is None or choice.extra_runs == 0:
        return False
    shorter = length / choice.segment
    scratch = needs.scratch - needs.grads - needs.output_grads
    problem = replace(
        choice.problem,
        segment=length,
        tape=max(int(choice.problem.tape * shorter), 1),
        memory=choice.problem.memory + int(scratch * (1 - shorter)),
        write=choice.problem.write / shorter,
        read=choice.problem.read / shorter,
    )
    return steps_run(Choice(choice.schedule, problem)) < _WORTHWHILE * steps_run(choice)
