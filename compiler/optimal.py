"""Optimal schedules for memory of one tier, by closed form.

Segments are to be reversed from a first carry that is held elsewhere, with M units of memory for carries (s units each)
and tapes of segments (a units each). Let N(M, r) be how many segments can be reversed if none runs forward more than r
times. All are taped at once, N(M, 1) = floor(M / a), or a carry is kept at step m: the segments before it run once to
get there and r - 1 times afterwards, those behind it have s units less:

    N(M, r) = N(M, r - 1) + N(M - s, r) = sum_i C(i + r - 2, i) floor((M - i s) / a)

No schedule needs fewer runs, beside one for each segment, than sum_k max(l - N(M, k), 0), as at most N(M, k) segments
run k times or less. With slots for carries and a tape of one segment beside them floor(...) is 1, N(M, r) is binomial,
and the bound is met: Griewank and Walther (2000), Algorithm 799: Revolve, doi 10.1145/347837.347846. Where carries and
tapes have sizes of their own, ``pieces`` is optimal if no segment needs to run more than twice, else near it. That a
slot may hold a tape in place of a carry is Gruslys et al. (2016), arXiv 1606.03401.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OneTier:
    """Memory for carries of ``carry`` units and tapes of segments of ``tape`` units; with ``tape`` 0 one segment can
    always be taped beside the carries. Memory is what there is besides the first carry."""

    carry: int
    tape: int

    def taped(self, memory: int) -> int:
        """Segments that can be taped at once: N(M, 1)."""
        if memory < 0:
            return 0
        return memory // self.tape if self.tape else 1

    def reach(self, memory: int, runs: int) -> int:
        """N(M, r), for r of at least 1."""
        if runs == 1:
            return self.taped(memory)
        total, ways = 0, 1
        for kept in range(memory // self.carry + 1 if memory >= 0 else 0):
            total += ways * self.taped(memory - kept * self.carry)
            ways = ways * (kept + runs - 1) // (kept + 1)
        return total

    def reaches(self, segments: int, memory: int) -> list[int]:
        """N(M, 0) = 0, N(M, 1), ... up to the first that is not below ``segments``; one entry if there is none."""
        if segments > self.taped(memory) and not self.taped(memory - self.carry):
            return [0]
        found = [0]
        while found[-1] < segments:
            found.append(self.reach(memory, len(found)))
        return found

    def runs(self, segments: int, memory: int) -> int:
        """How often the segment that runs most often runs forward: the least r with N(M, r) >= segments. 0: they cannot
        be reversed at all."""
        return len(self.reaches(segments, memory)) - 1

    def bound(self, segments: int, memory: int) -> int:
        """Runs forward beside one for each segment that no schedule can do without."""
        return sum(segments - reach for reach in self.reaches(segments, memory)[1:-1])

    def extra(self, segments: int, memory: int) -> int:
        """Runs forward beside one for each segment, if sweeps take these ``pieces``."""
        return _extra(self, segments, memory)

    def pieces(self, segments: int, memory: int) -> list[tuple[int, int]]:
        """An optimal first sweep: (segments, memory while they are reversed) of each piece, of which each but the first
        keeps a carry at its start, and the last is taped.

        Of the optimal cuts it takes those that leave full pieces, N(M, r) of them, so that equal ones occur often.
        """
        found, reach = [], self.reaches(segments, memory)
        while len(reach) > 2:
            behind = reach[-2] - reach[-3] if len(reach) > 3 else self.taped(memory - self.carry)
            cut = min(reach[-2], segments - behind)
            found.append((cut, memory))
            segments, memory = segments - cut, memory - self.carry
            reach = [0, self.taped(memory), *(reach[k] - reach[k - 1] for k in range(2, len(reach)))]
            while len(reach) > 2 and reach[-2] >= segments:
                reach.pop()
        return [*found, (segments, memory)]


@functools.lru_cache(maxsize=1 << 16)
def _extra(tier: OneTier, segments: int, memory: int) -> int:
    *kept, _ = tier.pieces(segments, memory)
    return sum(piece + _extra(tier, piece, left) for piece, left in kept)
