"""What a tree of intervals costs, without the program that plays it: equal intervals are one object, counted once.

The counts are those of the verifier (``reroll.program.tally``) for the program that the passes save, recompute and
offload make of the tree, if no two carries are moved together, and no first child of a local interval is remote.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reroll.schedules.interval import Interval
from reroll.schedules.problem import Problem


@dataclass(frozen=True, slots=True)
class Counts:
    """Peaks in bytes, steps that run again, runs of a segment without its tape, carries written and read."""

    local_peak: int
    remote_peak: int
    rerun: int
    runs: int
    writes: int
    reads: int


def counted(root: Interval, problem: Problem) -> Counts:
    """The costs of a tree with the bytes of a problem."""
    counter = _Counter(problem)
    return counter.children(root, None) if root.children else Counts(counter.tape(root), 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Counter:
    """``known``: reversals by interval, and whether its carry is kept remotely."""

    problem: Problem
    known: dict[tuple[int, bool], Counts] = field(default_factory=dict)

    def tape(self, interval: Interval) -> int:
        """Bytes of a tape; a short segment takes its share of a whole one."""
        return -(-interval.steps * self.problem.tape // self.problem.segment)

    def reversal(self, interval: Interval, far: bool) -> Counts:
        """An interval reversed from its own carry, which counts: locally once it is read, remotely until it is."""
        key = id(interval), far
        if key not in self.known:
            if interval.children:
                self.known[key] = self.children(interval, far)
            else:
                local = self.problem.carry + self.tape(interval)
                self.known[key] = Counts(local, self.problem.carry if far else 0, 0, 0, 0, 1 if far else 0)
        return self.known[key]

    def children(self, interval: Interval, far: bool | None) -> Counts:
        """The run over an interval, which keeps the carries or tapes of its children, and their reversal, last to
        first. ``far``: whether its own carry, that of its first child too, is remote; None: there is none to keep."""
        carry = self.problem.carry
        own = 0 if far is None else carry
        local, remote, peaks = 0, 0, (own, own if far else 0)
        rerun = runs = writes = 0
        reads = 1 if far else 0
        for number, child in enumerate(interval.children):
            if child.taped:
                local += self.tape(child)
                peaks = max(peaks[0], local + (own if number == 0 else 0)), peaks[1]
                continue
            shared = number == 0 and far is not None
            moved = child.tier != "local" and not (shared and not far)
            inner = self.reversal(child, moved)
            peaks = max(peaks[0], local + inner.local_peak), max(peaks[1], remote + inner.remote_peak)
            local, remote = (local, remote + carry) if moved else (local + carry, remote)
            rerun, runs = rerun + child.steps + inner.rerun, runs - (-child.steps // self.problem.segment) + inner.runs
            writes, reads = writes + inner.writes + (1 if moved and not shared else 0), reads + inner.reads
        return Counts(max(peaks[0], local), max(peaks[1], remote), rerun, runs, writes, reads)
