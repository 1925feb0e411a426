"""What a legal training program costs: units held and moved, steps run.

Counting conventions: the running carry and gradients are not counted. Locally count the saved carries, the reloaded
carries (each until its own last use) and the tapes; remotely the offloaded blocks. A value is held until its last use,
and while an instruction runs its operands and its result are both held. ``holds`` says so, instruction by instruction;
what instructions need besides is in ``reroll.program.memory``.

It is walked twice: ``count`` takes a program as it is written, where a part is counted once however often it is played
(and holds the carry that it is given itself, until its own last use of it, if nobody needs it afterwards);
``reroll.program.timeline`` takes it spelled out, without parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from reroll.program.program import Program
from reroll.program.spelled import RUN_KINDS, Played, written


@dataclass(frozen=True, slots=True)
class Sizes:
    """Units (or bytes) of what is held.

    ``carry`` of one carry, ``tape_step`` of one taped step. ``packed(codec)`` overrides the first by the codec names
    of the instruction (a reloaded carry stays packed until it is read), ``taped(start, stop)`` the second for a tape,
    ``thin(start, stop)`` for a thin one, ``first`` the first where the program's own first carry is saved as it is: it
    is there anyway.
    """

    carry: int = 1
    tape_step: int = 1
    packed: Callable[[tuple[str, ...]], int] | None = None
    taped: Callable[[int, int], int] | None = None
    first: int | None = None
    thin: Callable[[int, int], int] | None = None

    def of_carry(self, codec: tuple[str, ...] = ()) -> int:
        """Units of one carry kept under ``codec``."""
        return self.carry if self.packed is None else self.packed(codec)

    def of_save(self, codec: tuple[str, ...], first: bool) -> int:
        """Units of a save; ``first``: of the carry that the program is given."""
        return self.first if first and not codec and self.first is not None else self.of_carry(codec)

    def of_tape(self, start: int, stop: int, thin: bool = False) -> int:
        """Units of the tape of steps [start, stop)."""
        if thin and self.thin is not None:
            return self.thin(start, stop)
        return (stop - start) * self.tape_step if self.taped is None else self.taped(start, stop)


class Hold(NamedTuple):
    """Units that a tier holds while the instructions ``first`` to ``last`` run.

    ``items``: which carries of the value of the first one they are; none for a tape.
    """

    tier: str
    units: int
    first: int
    last: int
    items: Sequence[int] = ()


def holds(played: Sequence[Played], sizes: Sizes, given: int = 0) -> Iterator[Hold]:
    """What is held: tapes, saved carries and blocks until their last use, each reloaded carry until its own. ``given``:
    the units of the first carry, where the instructions hold it themselves."""
    last, items = _last_uses(played)
    whole = is_whole(played)
    if given:
        yield Hold("local", given, 0, last[0])
    for number, each in enumerate(played):
        if each.kind == "tape":
            yield Hold("local", sizes.of_tape(each.start, each.stop, each.thin), number, last[number])
        elif each.kind == "save":
            yield Hold("local", sizes.of_save(each.codec, each.reads[0] == 0 and whole), number, last[number], (0,))
        elif each.kind == "offload":
            block = range(len(each.reads))
            yield Hold(each.tier, len(block) * sizes.of_carry(each.codec), number, last[number], block)
        elif each.kind == "reload":
            source = played[each.reads[0]]
            units = sizes.of_carry(source.codec)
            for item in range(len(source.reads)):
                yield Hold("local", units, number, items.get((number, item), number), (item,))


def is_whole(played: Sequence[Played]) -> bool:
    """Whether instructions are those of a program, not of a part, which is given a gradient beside a carry."""
    return len([each for each in played[:2] if each.kind == "carry"]) == 1


def _last_uses(played: Sequence[Played]) -> tuple[list[int], dict[tuple[int, int], int]]:
    """The number at which each value is read last (its own if never); the same for each carry of a reloaded block."""
    last = list(range(len(played)))
    items: dict[tuple[int, int], int] = {}
    for number in reversed(range(len(played))):  # all that read an instruction are behind it
        each = played[number]
        for source in each.reads:
            last[source] = max(last[source], number)
        if each.kind == "pick":
            item = (each.reads[0], each.item)
            items[item] = max(items.get(item, 0), last[number])
    return last, items


def occupancy(count: int, holding: Sequence[Hold]) -> dict[str, list[int]]:
    """The units of each tier, "local" first, while each of ``count`` instructions runs."""
    tiers = dict.fromkeys(["local", *(each.tier for each in holding)])
    changes = {tier: [0] * (count + 1) for tier in tiers}
    for each in holding:
        changes[each.tier][each.first] += each.units
        changes[each.tier][each.last + 1] -= each.units
    return {tier: list(accumulate(change))[:-1] for tier, change in changes.items()}


@dataclass(frozen=True, slots=True)
class Counted:
    """One graph by itself: its instructions, the units that each tier holds while each of them runs, and the most local
    ones. ``given`` has for each ``reverse``, by its number, the units of the carry that the part itself holds."""

    played: tuple[Played, ...]
    units: Mapping[str, Sequence[int]]
    peak: int
    given: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Tally:
    """Costs of one program. Peaks are in the units of ``Sizes``; writes and reads are transfers.

    ``remote_peak`` is that of all remote tiers together, ``tier_peaks`` of each; ``peak_nodes`` names the node at which
    each tier ("local" too) first reaches its peak. ``forward_steps`` are all steps run forward, ``reforward_steps``
    those among them that had run before. ``whole`` is the graph by itself, ``parts`` are the parts by name and by the
    units of the carry that they hold.
    """

    local_peak: int
    remote_peak: int
    tier_peaks: Mapping[str, int]
    peak_nodes: Mapping[str, str]
    forward_steps: int
    reforward_steps: int
    remote_writes: int
    remote_reads: int
    carries_written: int
    carries_read: int
    whole: Counted = field(repr=False)
    parts: Mapping[tuple[str, int], Counted] = field(repr=False)

    @property
    def timeline(self) -> tuple[tuple[str, int], ...]:
        """Every node with the local units held while it runs."""
        return tuple(
            (each.name, units) for each, units in zip(self.whole.played, self.whole.units["local"], strict=True)
        )


def count(program: Program, sizes: Sizes) -> Tally:
    """The costs of a program that was found legal."""
    played = written(program.graph)
    counter = _Counter(sizes, {name: written(part.graph) for name, part in program.parts.items()})
    whole = counter.count(played)
    tiers = {tier: units for tier, units in whole.units.items() if tier != "local"}
    remote = [sum(each) for each in zip(*tiers.values(), strict=True)]
    writes = [len(each.reads) for each in played if each.kind == "offload"]
    reads = [len(played[each.reads[0]].reads) for each in played if each.kind == "reload"]
    forward = counter.forward_steps(played)
    return Tally(
        local_peak=whole.peak,
        remote_peak=max(remote, default=0),
        tier_peaks={tier: max(units) for tier, units in tiers.items()},
        peak_nodes={tier: played[units.index(max(units))].name for tier, units in whole.units.items()},
        forward_steps=forward,
        reforward_steps=forward - program.steps,
        remote_writes=len(writes),
        remote_reads=len(reads),
        carries_written=sum(writes),
        carries_read=sum(reads),
        whole=whole,
        parts=counter.parts,
    )


@dataclass(frozen=True, slots=True)
class _Counter:
    """Counts instructions, and first the parts that they play: each once for each number of units that it is given.

    ``written``: the instructions of the parts, each after those that it plays.
    """

    sizes: Sizes
    written: Mapping[str, tuple[Played, ...]]
    parts: dict[tuple[str, int], Counted] = field(default_factory=dict)

    def count(self, played: tuple[Played, ...], given: int = 0) -> Counted:
        """Of a graph that holds so many units of its first carry. What dies with a ``reverse`` is the carry that it
        gives to its part, which holds it from there on."""
        holding = list(holds(played, self.sizes, given))
        units = occupancy(len(played), holding)
        local, dying = units["local"], defaultdict[int, int](int)
        for each in holding:
            dying[each.last] += each.units
        handed = {number: dying[number] for number, each in enumerate(played) if each.kind == "reverse"}
        for number, own in handed.items():
            local[number] += self._part(played[number].part, own).peak - own
        return Counted(played, units, max(local), handed)

    def _part(self, name: str, given: int) -> Counted:
        if (name, given) not in self.parts:
            self.parts[name, given] = self.count(self.written[name], given)
        return self.parts[name, given]

    def forward_steps(self, played: tuple[Played, ...]) -> int:
        """All steps that are run forward."""
        inside: dict[str, int] = {}
        for name, each in (*self.written.items(), ("", played)):
            steps = sum(one.stop - one.start for one in each if one.kind in RUN_KINDS)
            inside[name] = steps + sum(inside[one.part] for one in each if one.kind == "reverse")
        return inside[""]
