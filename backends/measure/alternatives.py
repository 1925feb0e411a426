"""What other schedules would take in place of the one that was chosen, for a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reroll.backends.construct.kernels import passes_of
from reroll.backends.construct.plan import Built, cost
from reroll.errors import RerollError
from reroll.planning.alternative import Alternative
from reroll.planning.choice import Choice, may_move
from reroll.program.program import store_all
from reroll.program.registry import run
from reroll.program.tally import Tally
from reroll.schedules.interval import best_chunk, best_slots
from reroll.schedules.machine import Costs, work_seconds
from reroll.schedules.named import find, least_memory
from reroll.schedules.problem import Problem

_LEVELS = 5
_MANY = 2_000  # pieces of a sequence from which on an alternative is not worth the time to look at it


def alternatives(built: Built, costs: Costs) -> tuple[Alternative, ...]:
    """The chosen plan, and what plain BPTT, standard and the optimum for several sizes of memory would take; where
    carries may be moved, remote, double and the optimum over two tiers too."""
    found = [_alternative(built, built.choice, built.tally, built.prediction.peak, costs)]
    chosen = built.choice.describe()
    for name, choice in {each.describe(): each for each in _choices(built, costs)}.items():
        if name == chosen or len(choice.root.children) > _MANY:
            continue
        start = store_all(choice.steps, choice.segment)
        try:
            program = run(passes_of(built.options), start, replace(built.context, root=choice.root))
        except RerollError:  # a pass of the user's own may be made for another schedule
            continue
        tally, prediction = cost(program, built.needs)
        other = _alternative(built, choice, tally, prediction.peak, costs)
        found += [other] if other.tiers or "remote" not in find(choice.schedule).numbers else []  # revolve's, else
    return tuple(found)


def may_move_carries(built: Built) -> bool:
    """Whether the chosen plan, or others that were weighed against it, move carries to a tier."""
    return "remote" in find(built.choice.schedule).numbers or may_move(built.options)


def _choices(built: Built, costs: Costs) -> Iterator[Choice]:
    chosen, moving = built.choice, may_move_carries(built)
    problem, tape = chosen.problem, max(chosen.problem.tape // chosen.segment, 1)
    chunk = best_chunk(problem.steps, problem.carry, tape)
    yield Choice("store_all", problem)
    yield Choice("standard", replace(problem, chunk=chunk))
    if moving:
        slots = min(best_slots(chunk, problem.carry, tape), chunk)
        yield Choice("remote", replace(problem, chunk=chunk))
        yield Choice("double", replace(problem, chunk=chunk, slots=slots))
    for memory in _memories(problem):
        yield Choice("revolve", replace(problem, memory=memory, slots=None))
    if moving and problem.tier != "local":
        moved = problem.moving(costs.machine.tier(problem.tier), costs.of(chosen.segment).forward)
        for memory in _memories(problem):
            yield Choice("hrevolve", replace(moved, memory=memory, slots=None))


def _memories(problem: Problem) -> Iterator[int]:
    """Sizes of memory from the least to nearly all tapes, each the same factor larger."""
    low, high = least_memory(problem), problem.segments * problem.tape
    for level in range(_LEVELS):
        yield round(low * (high / low) ** (level / _LEVELS))


def _alternative(built: Built, choice: Choice, tally: Tally, peak: int, costs: Costs) -> Alternative:
    seconds, tiers = _seconds(built, tally, costs), dict(tally.tier_peaks)
    return Alternative(choice.describe(), peak, seconds, tally.reforward_steps, tiers, chosen=choice is built.choice)


def _seconds(built: Built, tally: Tally, costs: Costs) -> float:
    """Of all runs, backwards and transfers, one after another."""
    steps = built.executable.recurrence.steps
    ahead = work_seconds(costs.segments, "advance", steps)
    back = work_seconds(costs.segments, "backward", steps)
    moved = 0.0
    for tier in tally.tier_peaks:
        place, carry = costs.machine.tier(tier), built.choice.problem.carry
        moved += place.write_seconds(tally.carries_written * carry, tally.remote_writes)
        moved += place.read_seconds(tally.carries_read * carry, tally.remote_reads)
    return ahead * tally.forward_steps / steps + back + moved
