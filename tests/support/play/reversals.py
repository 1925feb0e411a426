"""What the tests of optimal schedules share: a machine that plays schedules, and searches through all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from reroll.schedules.optimal.problem import LocalSlots, OneTier, Piece, Schedule, SlowTier

LONG = 100_000


@dataclass
class Player:
    """Plays a schedule piece by piece; every rule of the problem is an assertion."""

    schedule: Schedule
    fast: OneTier | LocalSlots
    slow: tuple[SlowTier, ...] = ()
    cost: float = 0
    reversed_to: int = 0
    held: list[int] = field(default_factory=list)

    def play(self) -> float:
        """The cost of the schedule."""
        root = self.schedule.root
        self.reversed_to, self.held = root.length, [0] * (1 + len(self.slow))
        self._keep(root.tier)
        self._reverse(root, 0)
        assert self.reversed_to == 0
        self._free(root.tier)
        assert not any(self.held)
        return self.cost

    def _keep(self, tier: int | None) -> None:
        assert tier is not None
        self.held[tier] += 1
        if tier:
            slots = self.slow[tier - 1].slots
            assert slots is None or self.held[tier] <= slots
            self.cost += self.slow[tier - 1].write
        self._fits(0)

    def _free(self, tier: int | None) -> None:
        assert tier is not None
        self.held[tier] -= 1

    def _fits(self, tapes: int) -> None:
        """Whether the fast tier holds so many tapes too. In bytes one carry is not counted."""
        if isinstance(self.fast, LocalSlots):
            assert self.held[0] <= self.fast.slots
            assert tapes <= 1
        else:
            carries = max(self.held[0] - 1, 0)
            assert carries * self.fast.carry + tapes * self.fast.tape <= self.fast.memory

    def _tape(self, start: int, length: int) -> None:
        assert length > 0
        assert start + length == self.reversed_to
        self._fits(length)
        self.reversed_to = start

    def _reverse(self, piece: Piece, start: int) -> None:
        """Reverse a piece whose carry is in hand."""
        parts = self.schedule.pieces(piece)
        if not parts:
            self._tape(start, piece.length)
            return
        assert sum(part.length for part in parts) == piece.length
        starts = [start + sum(part.length for part in parts[:at]) for at in range(len(parts))]
        for at, part in enumerate(parts):
            if part.tier is None:
                assert at == len(parts) - 1
                self._tape(starts[at], part.length)
                continue
            self.cost += part.length
            if at or part.tier != piece.tier:
                self._keep(part.tier)
        for at in reversed(range(len(parts) - 1)):
            part = parts[at]
            assert part.tier is not None
            self.cost += self.slow[part.tier - 1].read if part.tier else 0
            self._reverse(part, starts[at])
            if at or part.tier != piece.tier:
                self._free(part.tier)


def played(schedule: Schedule, fast: OneTier | LocalSlots, *slow: SlowTier) -> float:
    """The cost of a schedule, played step by step."""
    return Player(schedule, fast, slow).play()


def problems(schedule: Schedule) -> tuple[int, int]:
    """Over all pieces of a schedule: how many differ, and how deep they nest."""
    depth = {schedule.root: 0}
    waiting = [schedule.root]
    while waiting:
        piece = waiting.pop()
        for part in schedule.pieces(piece):
            if part.tier is not None and part not in depth:
                depth[part] = depth[piece] + 1
                waiting.append(part)
    return len(depth), max(depth.values())


@dataclass(frozen=True)
class Moment:
    """Of a search: what is reversed, where the run is and from which carry it came, carries and tapes that are kept."""

    left: int
    at: int
    origin: int
    carries: frozenset[int] = frozenset()
    tapes: frozenset[int] = frozenset()


def least_runs(steps: int, memory: OneTier) -> float:
    """The least extra runs over all that can be done in bytes: tape a segment in any run, drop anything at any time.

    A carry that was restarted from is held as long as the run from it goes on, as everywhere in this house.
    """
    start = Moment(steps, 0, 0)
    runs, waiting = {start: 0}, deque([start])
    while waiting:
        now = waiting.popleft()
        if now.left == 0:
            return runs[now] - steps
        for cost, then in moves(now, memory):
            if runs[now] + cost < runs.get(then, inf):
                runs[then] = runs[now] + cost
                (waiting.append if cost else waiting.appendleft)(then)
    return inf


def moves(now: Moment, memory: OneTier) -> Iterator[tuple[int, Moment]]:
    """What can be done next, with its cost."""
    used = len(now.carries) * memory.carry + len(now.tapes) * memory.tape
    if now.left - 1 in now.tapes:
        carries = frozenset(carry for carry in now.carries if carry < now.left - 1)
        yield 0, Moment(now.left - 1, now.at, now.origin, carries, now.tapes - {now.left - 1})
        return
    for carry in (0, *now.carries):
        yield 0, replace(now, at=carry, origin=carry)
    for carry in now.carries - {now.origin}:
        yield 0, replace(now, carries=now.carries - {carry})
    for tape in now.tapes:
        yield 0, replace(now, tapes=now.tapes - {tape})
    if now.at < now.left and now.at not in (0, *now.carries) and used + memory.carry <= memory.memory:
        yield 0, replace(now, carries=now.carries | {now.at})
    if now.at < now.left:
        yield 1, replace(now, at=now.at + 1)
        if now.at not in now.tapes and used + memory.tape <= memory.memory:
            yield 1, replace(now, at=now.at + 1, tapes=now.tapes | {now.at})


def least_cost(steps: int, fast: OneTier | LocalSlots, *slow: SlowTier) -> float:
    """The least cost over all nested schedules: a carry in any tier, copied or moved to a faster one when read."""
    writes, reads = (0, *(tier.write for tier in slow)), (0, *(tier.read for tier in slow))
    carries = fast.slots if isinstance(fast, LocalSlots) else fast.memory // fast.carry + 1

    def block(free: tuple[int, ...]) -> int:
        if isinstance(fast, LocalSlots):
            return 1
        return (fast.memory - max(carries - free[0] - 1, 0) * fast.carry) // fast.tape

    def with_one_more(free: tuple[int, ...], tier: int) -> tuple[int, ...]:
        return (*free[:tier], free[tier] - 1, *free[tier + 1 :])

    @lru_cache(None)
    def new(length: int, free: tuple[int, ...]) -> float:
        """Segments whose carry is in hand and not kept."""
        kept = (held(length, with_one_more(free, to), to) + write for to, write in enumerate(writes) if free[to])
        return 0 if length <= block(free) else min(kept, default=inf)

    @lru_cache(None)
    def held(length: int, free: tuple[int, ...], tier: int) -> float:
        """Segments whose carry is in hand and kept in a tier."""
        if length <= block(free):
            return 0
        best = inf
        for to in range(tier):
            if free[to]:
                copied = with_one_more(free, to)
                moved = (*copied[:tier], copied[tier] + 1, *copied[tier + 1 :])
                best = min(best, writes[to] + held(length, copied, to), writes[to] + held(length, moved, to))
        cuts = (j + held(j, free, tier) + reads[tier] + new(length - j, free) for j in range(1, length))
        return min(best, *cuts) if length > 1 else best

    return new(steps, (carries, *(steps if tier.slots is None else tier.slots for tier in slow)))
