"""What every tier holds while a spelled-out program is played, instruction by instruction.

The rules are those of ``reroll.program.tally`` (a value is held until its last use) and ``reroll.program.memory`` (what an
instruction needs besides), for programs as ``reroll.program.spelled`` spells them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reroll.program.memory import Needs, waiting, working
from reroll.program.spelled import RUNS, Played
from reroll.program.tally import Sizes


@dataclass(frozen=True, slots=True)
class Hold:
    """Bytes that a tier holds while the instructions ``first`` to ``last`` run, and the steps of their carries."""

    tier: str
    nbytes: int
    first: int
    last: int
    carries: tuple[int, ...] = ()


def holds(played: Sequence[Played], sizes: Sizes) -> Iterator[Hold]:
    """What is held: tapes, saved carries and blocks until their last use, each reloaded carry until its own."""
    last, items = _last_uses(played)
    steps: list[tuple[int, ...]] = []
    for number, each in enumerate(played):
        steps.append(_carries(each, steps))
        if each.kind == "tape":
            yield Hold("local", sizes.of_tape(each.start, each.stop), number, last[number])
        elif each.kind == "save":
            yield Hold("local", sizes.of_carry(each.codec), number, last[number], steps[number])
        elif each.kind == "offload":
            nbytes = len(each.reads) * sizes.of_carry(each.codec)
            yield Hold(each.tier, nbytes, number, last[number], steps[number])
        elif each.kind == "reload":
            nbytes = sizes.of_carry(played[each.reads[0]].codec)
            for item, step in enumerate(steps[number]):
                yield Hold("local", nbytes, number, items.get((number, item), number), (step,))


def _last_uses(played: Sequence[Played]) -> tuple[list[int], dict[tuple[int, int], int]]:
    """The number at which each value is read last (its own if never); the same for each carry of a reloaded block."""
    last = list(range(len(played)))
    for number, each in enumerate(played):
        for source in each.reads:
            last[source] = number
    items: dict[tuple[int, int], int] = {}
    for number, each in enumerate(played):
        if each.kind == "pick":
            item = (each.reads[0], each.item)
            items[item] = max(items.get(item, 0), last[number])
    return last, items


def _carries(each: Played, steps: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The steps of the carries that an instruction gives."""
    if each.kind in RUNS:
        return (each.stop,)
    if each.kind in ("backward", "turn", "output"):
        return ()
    read = tuple(step for source in each.reads for step in steps[source])
    return (0,) if each.kind == "carry" else (read[each.item],) if each.kind == "pick" else read


def memory(played: Sequence[Played], held: Sequence[Hold], needs: Needs) -> Mapping[str, tuple[int, ...]]:
    """The bytes of each tier, "local" first, while each instruction runs."""
    tiers = dict.fromkeys(["local", *(hold.tier for hold in held)])
    changes = {tier: np.zeros(len(played) + 1, dtype=np.int64) for tier in tiers}
    for hold in held:
        changes[hold.tier][hold.first] += hold.nbytes
        changes[hold.tier][hold.last + 1] -= hold.nbytes
    nbytes = {tier: np.cumsum(change)[:-1] for tier, change in changes.items()}
    nbytes["local"] += np.fromiter(_besides(played, needs), dtype=np.int64)
    return {tier: tuple(each.tolist()) for tier, each in nbytes.items()}


def _besides(played: Sequence[Played], needs: Needs) -> Iterator[int]:
    """Local bytes that each instruction needs besides what is held: blocks that wait to be written, the gradients that
    are handed on, and what it works with."""
    work, handed = working(needs), 0
    none: Sequence[int] = [0] * needs.staged
    staged = none
    for each in played:
        written = len(each.reads) * needs.sizes.of_carry(each.codec) if each.kind == "offload" else 0
        staged = waiting(staged, each.kind, written)
        if each.kind == "turn":
            handed = needs.grads + needs.output_grads
        owned = each.kind in RUNS and played[each.reads[0]].kind in RUNS
        yield sum(staged) + handed + work(each.kind, each.stop - each.start, owned)
        staged = none if each.kind == "turn" else staged
