"""All of a compiled recurrence that does not change from call to call."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from reroll.backends.inductor.event_counts import Watch
from reroll.backends.inductor.lower import Halved, Segment
from reroll.backends.processes.collectives import Agreement
from reroll.backends.runtime.gradients import Routes
from reroll.backends.runtime.recordings import Graphs, Half
from reroll.backends.runtime.values import Ledger
from reroll.backends.tiers.tier import Tier
from reroll.graph.memory import last_uses
from reroll.planning.truncation import Cuts
from reroll.program.program import Node, Program, backward, reverse, tape, turn
from reroll.program.writing import RUNS
from reroll.recurrence import Recurrence
from reroll.schedules.machine import pieces
from reroll.segment.invariants import Once
from reroll.segment.trace import numbers_of


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """A node of the program, and the nodes whose last use it is."""

    node: Node
    dead: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PartInstructions:
    """A part as it is played: what it is given, its instructions, and the node of its result."""

    carry: Node
    grad: Node
    instructions: tuple[Instruction, ...]
    result: Node

    @classmethod
    def of(cls, graph: fx.Graph) -> PartInstructions:
        """Note where the values of a part die."""
        carry, grad = graph.find_nodes(op="placeholder")
        (result,) = graph.output_node().all_input_nodes
        return cls(carry, grad, _instructions(graph), result)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramInstructions:
    """A program as it is played: its halves, its parts, the tapes that pass right on to their backward, and the tapes
    made in the backward half whose carry nobody reads."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    parts: Mapping[str, PartInstructions]
    passing: frozenset[Node]
    unread: frozenset[Node]

    @classmethod
    def of(cls, program: Program, segments: Mapping[int, Segment], cut: bool = False) -> ProgramInstructions:
        """Split a program at its turn, and note where values die, and which tapes pass right on; none where cuts may
        make several segments of one."""
        whole = _instructions(program.graph)
        at = next(i for i, each in enumerate(whole) if each.node.target is turn)
        forward, backward = whole[: at + 1], whole[at + 1 :]
        parts = {name: PartInstructions.of(part.graph) for name, part in program.parts.items()}
        again = (backward, *(part.instructions for part in parts.values()))
        passing = [] if cut else [node for each in (forward, *again) for node in _passing(each, segments)]
        unread = (each.node for run in again for each in run if _is_unread(each.node))
        return cls(forward, backward, parts, frozenset(passing), frozenset(unread))


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The compiled segments of a recurrence by their length, the longest first, and what they share.

    ``watch`` counts their event products; ``once`` makes what they need once per call; ``graphs`` records them, where a
    device can do that; ``latest`` trained with them.
    """

    segments: Mapping[int, Segment]
    watch: Watch
    once: Once
    graphs: Graphs
    latest: Latest = field(default_factory=lambda: Latest())


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which inputs of a segment are rows of sequences that may have to be copied, to lie as it takes them.

    ``places``: among its inputs. ``saved``: (number, place) of each that its forward saves as it is.
    """

    places: tuple[int, ...]
    saved: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segment: Segment, recurrence: Recurrence) -> Rows:
        """The rows of a segment of a recurrence."""
        places = tuple(place for place, _ in recurrence.loose_rows(segment.steps))
        saved = segment.saved_inputs.items()
        return cls(places, tuple((number, place) for number, place in saved if place in places))


@dataclass(slots=True)
class Clock:
    """Wall seconds of the last call of a recurrence: of its forward while training, and of its backward. ``reversed``:
    how many backwards there were."""

    forward: float | None = None
    backward: float | None = None
    reversed: int = 0

    @contextmanager
    def timing(self, half: str) -> Iterator[None]:
        """Clock what runs inside."""
        start = time.perf_counter()
        yield
        setattr(self, half, time.perf_counter() - start)
        self.reversed += half == "backward"

    @property
    def seconds(self) -> float | None:
        """Of both halves, once both have run."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


@dataclass(slots=True)
class Latest:
    """The executable that trained last with some segments, of whatever number of steps, while it is there."""

    _found: Callable[[], Executable | None] = lambda: None

    def note(self, executable: Executable) -> None:
        """It has trained now."""
        self._found = weakref.ref(executable)

    @property
    def executable(self) -> Executable | None:
        """None where nothing has trained, or where it is gone."""
        return self._found()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Executable:
    """A recurrence with its program and compiled segments: all that does not change from call to call.

    onlookers: told in the forward of a call, before each segment, of its first step, the one behind its last, the carry
    before it and the operands of the loop.
    """

    recurrence: Recurrence
    program: Program
    compiled: Compiled
    routes: Mapping[int, Routes]
    rows: Mapping[int, Rows]
    instructions: ProgramInstructions
    tiers: Mapping[str, Tier]
    verify: bool
    together: Agreement | None = None
    cuts: Cuts | None = None
    ledger: Ledger = field(default_factory=Ledger)
    clock: Clock = field(default_factory=Clock)
    onlookers: list[Callable[[int, int, Sequence[Tensor], Sequence[Tensor]], None]] = field(default_factory=list)
    _numbers: list[Mapping[int, Tensor]] = field(default_factory=list, init=False)
    _live: dict[frozenset[int], frozenset[int]] = field(default_factory=dict, init=False)

    @property
    def numbers(self) -> Mapping[int, Tensor]:
        """What steps read that are numbers, of all steps, by the input; made at the first call."""
        if self._numbers:
            return self._numbers[0]
        found = numbers_of(self.recurrence)
        if all(type(each) is Tensor for each in found.values()):  # not what is only there while a mode is
            self._numbers.append(found)
        return found

    @classmethod
    def of(
        cls,
        recurrence: Recurrence,
        program: Program,
        compiled: Compiled,
        *,
        tiers: Mapping[str, Tier] | None = None,
        verify: bool = False,
        cuts: Cuts | None = None,
    ) -> Executable:
        """A program of a recurrence with its compiled segments, and the ``tiers`` to which it moves carries.

        ``verify``: carries that are reached again are compared. ``cuts``: where no gradient of a carry passes.
        """
        segments = compiled.segments
        return cls(
            recurrence=recurrence,
            program=program,
            compiled=compiled,
            routes={steps: Routes.of(segment, recurrence) for steps, segment in segments.items()},
            rows={steps: Rows.of(segment, recurrence) for steps, segment in segments.items()},
            instructions=ProgramInstructions.of(program, segments, cuts is not None),
            tiers=tiers or {},
            verify=verify,
            together=Agreement.of(recurrence, program, segments),
            cuts=cuts,
        )

    def run_forward(self, segment: Segment, inputs: list[Any], *, lasting: bool, alone: bool) -> list[Any]:
        """Run a segment; with ``lasting`` its tape stays what it is while others run. Empties the list of inputs.

        ``alone``: the tape is all that is read, so where it can be made without the outputs, these are None.
        """
        carried, outputs = len(self.recurrence.carries), segment.outputs
        if alone and not self.verify and isinstance(segment.forward, Halved):
            return [None] * outputs + segment.forward.saved(inputs)
        return self.compiled.graphs.play(
            Half(segment.steps, "forward"), segment.forward, inputs, lambda n: n < carried or (lasting and n >= outputs)
        )

    def run_backward(self, segment: Segment, inputs: list[Tensor], thin: bool) -> list[Tensor | None]:
        """Run the backward of a segment, from a ``thin`` tape or a whole one. Gradients of carries stay what they are,
        others until the next call."""
        if segment.backward is None:
            raise AssertionError("a segment through which no gradient goes is not reversed")
        if thin and segment.thin:
            return list(segment.thin.backward(inputs))
        forward, routes = Half(segment.steps, "forward"), self.routes[segment.steps]
        return self.compiled.graphs.play(
            Half(segment.steps, "backward"),
            segment.backward,
            inputs,
            routes.carries.__contains__,
            lambda: segment.kept(list(self.compiled.graphs.results(forward)[segment.outputs :]), thin=False),
        )

    def lengths(self, start: int, stop: int) -> list[int]:
        """The lengths of the segments of a range of steps, which end where gradients are cut."""
        ranges = self.cuts.ranges(start, stop) if self.cuts else [(start, stop)]
        parts = (part for low, high in ranges for part in pieces(high - low, self.compiled.segments))
        return [length for length, count in parts for _ in range(count)]

    def passed_on(self, grads: list[Tensor | None], start: int) -> list[Tensor | None]:
        """The gradients of carries at a step, without those that are cut there."""
        cut = self.cuts.at(start) if self.cuts else ()
        return [None if carry in cut else grad for carry, grad in enumerate(grads)]

    def live_operands(self, results: frozenset[int]) -> frozenset[int]:
        """Operands that gradients of these results reach, segment by segment: what a carry reaches may change from one
        to the next. The others get none, as in eager, rather than one of zeros."""
        if results not in self._live:
            carried = len(self.recurrence.carries)
            carries, rows, found = results.intersection(range(carried)), results.difference(range(carried)), set[int]()
            for steps in reversed(self.lengths(0, self.recurrence.steps)):
                reached, operands = self.routes[steps].reach(carries | rows)
                carries = frozenset(reached)
                found |= operands
            self._live[results] = frozenset(found) | carries
        return self._live[results]

    def empty_outputs(self) -> list[Tensor]:
        """Buffers for the stacked outputs, of the shapes that the first segment gives."""
        segment, recurrence = next(iter(self.compiled.segments.values())), self.recurrence
        rows = zip(segment.output_examples[len(recurrence.carries) :], recurrence.kept_rows, strict=True)
        sizes = ((like, (kept.rows(recurrence.steps), *like.shape[1:])) for like, kept in rows)
        return [torch.empty(size, dtype=like.dtype, device=like.device) for like, size in sizes]


def _instructions(graph: fx.Graph) -> tuple[Instruction, ...]:
    dead = last_uses(graph)
    return tuple(Instruction(node, tuple(dead.get(node, ()))) for node in graph.nodes if node.op == "call_function")


def _passing(instructions: Sequence[Instruction], segments: Mapping[int, Segment]) -> Iterator[Node]:
    """Tapes of one segment that are used up before any other segment runs forward."""
    last: Node | None = None
    for node in (each.node for each in instructions):
        if last and node.target is backward and node.args[0] is last and len(last.users) == 1:
            yield last
        if node.target in (*RUNS, reverse, backward):
            last = node if node.target is tape and _is_one_segment(node, segments) else None


def _is_unread(node: Node) -> bool:
    """Whether a node is a tape of which only that is read: nobody goes on from the carry behind it."""
    return node.target is tape and all(user.target is backward for user in node.users)


def _is_one_segment(node: Node, segments: Mapping[int, Segment]) -> bool:
    _, start, stop = cast(tuple[Node, int, int], node.args)
    return sum(count for _, count in pieces(stop - start, segments)) == 1
