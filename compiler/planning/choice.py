"""A schedule with its numbers, and what it costs in runs of a step."""

from __future__ import annotations

from dataclasses import dataclass

from reroll.report.tables import nbytes_text
from reroll.schedules.interval import Interval
from reroll.schedules.named import Problem, extra_runs, find, tree


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule with its numbers: the problem that it is given, in steps and bytes. ``allowed``: local bytes that it
    had to meet, if there was a budget. ``ahead``: blocks are read while the chunk behind them is reversed, which holds
    one more, rather than when they are needed."""

    schedule: str
    problem: Problem
    allowed: int | None = None
    ahead: bool = True

    @property
    def steps(self) -> int:
        """Steps of the recurrence."""
        return self.problem.steps

    @property
    def segment(self) -> int:
        """Steps of a segment."""
        return self.problem.segment

    @property
    def root(self) -> Interval:
        """Where carries are kept."""
        return tree(self.schedule, self.problem)

    @property
    def extra_runs(self) -> float:
        """What a schedule that is chosen for a budget costs beside one run of each segment, in runs, with transfers. 0
        for others, which do not depend on the length of segments."""
        if self.schedule in OPTIMAL:
            return extra_runs(self.schedule, self.problem)
        if self.schedule != "remote":
            return 0.0
        blocks = -(-self.steps // (self.problem.chunk or 1))
        return self.problem.segments + blocks * (self.problem.write + self.problem.read)

    def describe(self) -> str:
        """The schedule and the numbers that it uses."""
        problem, numbers = self.problem, find(self.schedule).numbers
        texts = [f"segment {problem.segment}"]
        texts += [f"chunk {problem.chunk}"] if "chunk" in numbers else []
        texts += [f"slots {problem.slots}"] if "slots" in numbers and problem.slots is not None else []
        memory = problem.memory if "memory" in numbers and problem.slots is None else None
        texts += [f"memory {nbytes_text(memory)}"] if memory is not None else []
        texts += [problem.tier if self.ahead else f"{problem.tier}, not read ahead"] if "remote" in numbers else []
        return f"{self.schedule} ({', '.join(texts)})"


OPTIMAL = ("revolve", "hrevolve")
_BACKWARD = 2.0  # a backward in runs of a forward
_CALL = 0.5  # what a call of a segment costs beside its steps, in runs of a step


def steps_run(choice: Choice) -> float:
    """The time of a choice in runs of a step, so that segments of other lengths can be compared. The same for the same
    network on every machine, but for what transfers cost there."""
    runs = (1 + _BACKWARD) * choice.steps + choice.extra_runs * choice.segment
    return runs * (1 + _CALL / choice.segment)
