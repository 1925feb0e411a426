"""Where an iteration of the user's loop begins among the operations of a step, and how many stand around a region.

A step that was found begins where the fewest bytes cross, which may be in the middle of the user's iteration. What is
cut between iterations (``truncate``) has to know where these begin: with the first statement of the loop's body. Where
that is a single one, with the first statement of what it calls; where it calls nothing, with the operation that came
first of all, unless it may do different things at different times. Reads of entries of sequences do not count, as the
normal form has them where they are used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from reroll.capture.steps.operands import Region
from reroll.capture.steps.step import Step, analyse
from reroll.graph.effects import operation
from reroll.graph.lines import Statement, statements_of
from reroll.recurrence import Peeled, Recurrence, Slices

Line = tuple[str, Any, str]
"""What an operation is, and the lines of the user's code that called one another to make it."""


def by_iterations(step: Step, others: Sequence[Step]) -> Step:
    """The step that begins where the user's iterations do; as it is where that is not known, or is no step.

    others: the steps that were found in the graph.
    """
    loop = _loop(step, others)
    place = loop.first if loop else None
    if not place:
        return step
    region = step.region
    found = analyse(step.sequence, Region(region.start + place, region.period, region.steps - 1))
    return found if found is not None and found.region.start == region.start + place else step


def with_iterations(recurrence: Recurrence, step: Step, others: Sequence[Step], *, cut: bool) -> Recurrence:
    """A recurrence that was taken out of a region, with how many iterations stand around that, where it is known.

    cut: gradients will be cut between them, so the operations of those behind are marked.
    Nothing is known over depth, and where a step is several iterations, which read entries of a sequence that are
    farther apart.
    """
    loop = None if recurrence.blocks or not _even(recurrence) else _loop(step, others)
    if loop is not None:
        recurrence = replace(recurrence, left=loop.left, within=bool(loop.first))
    return replace(recurrence, peeled=(_peeled(recurrence, loop),) * len(recurrence.carries)) if cut else recurrence


def _peeled(recurrence: Recurrence, loop: _Loop | None) -> Peeled | None:
    """The iterations around a loop. They are not known where a step begins within one, where no sequence is read, or
    one from a later entry on, as nothing may be left of iterations before a reset."""
    slices = [x for x in recurrence.xs if isinstance(x, Slices)]
    if loop is None or loop.first != 0 or not slices:
        return None
    peeled = loop.peeled(recurrence.name)
    return None if min(_entry(recurrence, x) for x in slices) > peeled.before else peeled


def _even(recurrence: Recurrence) -> bool:
    """Whether each step reads the next entry of all sequences."""
    return all(abs(x.stride) == 1 for x in recurrence.xs if isinstance(x, Slices))


def _entry(recurrence: Recurrence, x: Slices) -> int:
    """How many entries of a sequence come before that which is read first, from the end at which reading begins."""
    length = recurrence.examples[x.operand].shape[x.dim]
    return x.start if x.stride > 0 else length - 1 - x.start


@dataclass(frozen=True, slots=True)
class _Loop:
    """The statements that made the operations of a step which count, their places and lines; the lines of those before
    it in its loop, and those behind it."""

    traces: tuple[tuple[Statement, ...], ...]
    places: tuple[int, ...]
    lines: tuple[Line, ...]
    before: tuple[Line, ...]
    behind: tuple[fx.Node, ...]

    @property
    def first(self) -> int | None:
        """The place of a step at which iterations begin; None where that cannot be told."""
        depth = _parting(self.traces)
        found = _begin(self.traces, depth) if all(len(trace) > depth for trace in self.traces) else None
        if found is None and _one_statement(self.traces, depth):
            found = self._came_first()
        return self._with_reads(found) if found else found

    def _with_reads(self, number: int) -> int:
        """The place from which on nothing but reads of sequences comes before an operation."""
        return self.places[number - 1] + 1

    def _came_first(self) -> int | None:
        """The operation with which the first iteration begins, if that is whole."""
        period = len(self.lines)
        whole = self.lines * (len(self.before) // period + 1)
        return -len(self.before) % period if self.before == whole[len(whole) - len(self.before) :] else None

    def peeled(self, mark: str) -> Peeled:
        """Iterations, whole or in part, around the region. Marks the nodes of those behind."""
        for node in self.behind:
            node.meta["loop"] = mark
        return Peeled(self._iterations(self.before), self._iterations(_lines(self.behind)), mark)

    @property
    def left(self) -> int:
        """Iterations around the region; parts of two may make one. What nobody reads completes the last step."""
        return self._iterations([*self.before, *_lines([node for node in self.behind if node.users])])

    def _iterations(self, around: Sequence[Line]) -> int:
        once = Counter(self.lines)
        return max((-(-count // once[line]) for line, count in Counter(around).items()), default=0)


def _loop(step: Step, others: Sequence[Step]) -> _Loop | None:
    """None where lines are not known, or where those of another step are the same and the two may be of one loop."""
    region, nodes = step.region, step.sequence.nodes
    places = [at for at in range(region.period) if not _reads(step.node(at, 0))]
    inside = [step.node(at, 0) for at in places]
    lines = _lines(inside)
    if not lines or len(lines) < len(inside):
        return None
    known = set(lines)
    apart = [each for each in others if each.region != region]
    alike = [each for each in apart if known & {*_lines(_nodes(each))}]
    start = max((each.region.stop for each in alike if each.region.stop <= region.start), default=0)
    stop = min((each.region.start for each in alike if each.region.start >= region.stop), default=len(nodes))
    before = [line for line in _lines(nodes[start : region.start]) if line in known]
    behind = [node for node in nodes[region.stop : stop] if known & {*_lines([node])}]
    if (start and before) or (stop < len(nodes) and behind) or not all(_of_two_loops(step, each) for each in alike):
        return None
    return _Loop(tuple(map(statements_of, inside)), tuple(places), tuple(lines), tuple(before), tuple(behind))


def _of_two_loops(step: Step, other: Step) -> bool:
    """Whether steps of the same lines are those of two loops: both have all of them, and the states of the second do
    not begin with what the first makes. The loops of the layers of a stack are such."""
    first, second = sorted((step, other), key=lambda each: each.region.start)
    if {*_lines(_nodes(step))} != {*_lines(_nodes(other))}:
        return False
    made = range(first.region.start, first.region.stop)
    waiting, seen = [node for register in second.registers for node in register.initial], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or operation(node).like:
            continue
        if step.sequence.position.get(node, -1) in made:
            return False
        seen.add(node)
        waiting += node.all_input_nodes
    return True


def _nodes(step: Step) -> list[fx.Node]:
    """Those of the first step."""
    return step.sequence.nodes[step.region.start : step.region.start + step.region.period]


def _reads(node: fx.Node) -> bool:
    """Whether a node reads an entry of a sequence."""
    return node.target is torch.select


def _lines(nodes: Sequence[fx.Node]) -> list[Line]:
    """Those of some operations that count, without what was not made by a line of the user's."""
    traces = ((node, node.meta.get("stack_trace")) for node in nodes if not _reads(node))
    return [(node.op, node.target, trace) for node, trace in traces if trace]


def _parting(traces: Sequence[Sequence[Statement]]) -> int:
    """How deep the functions are the same that made some operations, and the statements above the last of them."""
    depth = 0
    while all(len(trace) > depth + 1 and trace[depth] == traces[0][depth] for trace in traces) and (
        len({(trace[depth + 1].file, trace[depth + 1].function) for trace in traces}) == 1
    ):
        depth += 1
    return depth


def _begin(traces: Sequence[Sequence[Statement]], depth: int) -> int | None:
    """Which of some operations begins the first statement, at a depth of calls; None if that is not in one piece, or
    all there is."""
    here = [trace[depth] for trace in traces]
    if len({(each.file, each.function) for each in here}) > 1:
        return None
    top = min(here)
    begins = [at for at, each in enumerate(here) if each == top and here[at - 1] != top]
    return begins[0] if len(begins) == 1 else None


def _one_statement(traces: Sequence[Sequence[Statement]], depth: int) -> bool:
    """Whether all operations were made by one statement that does the same at any time, and calls nothing."""
    return len({*traces}) == 1 and len(traces[0]) == depth + 1 and not traces[0][depth].branches
