"""Seconds of compiled segments: measured on values made up for it, and clocked while a program is played."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.construct.dry_run_timing import filled, rehearsed, weight_std
from reroll.backends.construct.kernels import Kernels
from reroll.backends.inductor.lower import ExtraOperands, Segment
from reroll.backends.runtime.executable import Compiled, Executable
from reroll.backends.runtime.gradients import Gradients
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.backends.tiers.calibrate import calibrate, seconds_of
from reroll.backends.tiers.device import Device, background_of
from reroll.backends.tiers.tier import Folder
from reroll.errors import OptionError, StorageError, UnsupportedError, is_shortage
from reroll.graph.fakes import laid_out_like
from reroll.graph.private import is_seeded, operator_name
from reroll.operations import of
from reroll.program.program import Program, store_all, tape
from reroll.program.spelled import spelled_out
from reroll.program.tally import Sizes, count
from reroll.program.writing import is_thin
from reroll.recurrence import Numbers, Recurrence
from reroll.schedules.machine import SegmentSeconds, work_seconds
from reroll.schedules.problem import Problem
from reroll.segment.joint.checks import values_made_up

_SHORT = 0.02  # seconds
_OTHERS = ("_softmax", "_log_softmax", "avg_pool2d")
_PROBABILITIES = {"bernoulli", "multinomial", "poisson", "binomial"}
_INDEXED = {"index", "index_put", "index_select", "index_add", "gather", "take", "embedding", "one_hot"} | {
    f"scatter{kind}" for kind in ("", "_add", "_reduce")
}
_LAUNCHED, _BEHIND = 5, 1.5  # runs in a row, and how much longer than to launch them they take where a device is behind


def segment_seconds(executable: Executable) -> dict[int, SegmentSeconds]:
    """Seconds of the segments of a recurrence by their length, on made-up values; takes a few hundredths of a second.

    The same kernels run forward whether their tape is kept or not. What is a matter of the values (the density of
    spikes) can be otherwise in training. Raises UnsupportedError if a segment does not take such numbers, or if it
    speaks with other processes, which would have to run it as often.
    """
    if executable.together:
        raise UnsupportedError(
            f"The steps of the loop at {executable.recurrence.where} speak with other processes, so they cannot be "
            "timed by one of them, and all have to have the same plan. Name a schedule that needs no times, such as "
            "'revolve' or 'double'."
        )
    if background_of(executable.recurrence.examples) and _ends_a_card(executable.compiled.segments.values()):
        raise UnsupportedError(
            f"The segments of the loop at {executable.recurrence.where} are not timed, as made-up values might end all "
            "work on this device: its steps make indices or probabilities of values. Name a schedule that needs no "
            "times, such as 'revolve' or 'double'."
        )
    with torch.no_grad(), random_numbers_kept(), values_made_up():
        try:
            return {steps: _seconds(executable, segment) for steps, segment in executable.compiled.segments.items()}
        except (RuntimeError, ValueError, IndexError) as error:
            if is_shortage(error):
                raise
            where = executable.recurrence.where
            raise UnsupportedError(
                f"The segments of the loop at {where} cannot be timed: on normal numbers they raise "
                f"{type(error).__name__}: {str(error).splitlines()[0]} Name a schedule that needs no times, such as "
                "'revolve' or 'double'."
            ) from error


def waits_for_launches(kernels: Kernels, recurrence: Recurrence, device: Device) -> bool:
    """Whether a device is done with the kernels of a segment about as soon as they are launched, on made-up values.

    If it is far behind, to record them gains nothing. A segment that may not take any values, such as one that makes
    indices of them, is not run, as a card would be lost for the process; it is taken for one that waits.
    """
    segment, host = kernels.compiled.segments[kernels.traced.steps], 0.0
    if not all(map(_takes_anything, segment.forward_graph.graph.nodes)):
        return True
    with torch.no_grad(), random_numbers_kept(), values_made_up():
        try:
            run = _Made.of(kernels.compiled, recurrence, segment).forward
            run()

            def launched() -> None:
                nonlocal host
                begin = time.perf_counter()
                for _ in range(_LAUNCHED):
                    run()
                host = time.perf_counter() - begin

            return device.seconds(launched) <= _BEHIND * host
        except (RuntimeError, ValueError, IndexError):
            return True


def _ends_a_card(segments: Iterable[Segment]) -> bool:
    """Whether an index or a probability may be made of values: a card stops for good at one that is none."""
    nodes = [node for each in segments for node in each.forward_graph.graph.nodes if node.op == "call_function"]
    names = {operator_name(node) for node in nodes}
    return bool(names & _PROBABILITIES) or (bool(names & _INDEXED) and any(map(_is_rounded, nodes)))


def _is_rounded(node: fx.Node) -> bool:
    """Whether an operation makes whole numbers of others."""
    value, name = node.meta.get("val"), operator_name(node)
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    whole = isinstance(value, Tensor) and not value.dtype.is_floating_point and value.dtype is not torch.bool
    floats = any(isinstance(each, Tensor) and each.dtype.is_floating_point for each in sources)
    return whole and floats and not name.startswith(("arg", "sort", "topk"))


def _takes_anything(node: fx.Node) -> bool:
    """Whether an operation of a segment fails on no values: element by element, a product, a sum, or a view."""
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem:
        return node.op != "call_module"
    name, known = operator_name(node), of(target)
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    sums = known.product or known.norm or known.reduction or name in _OTHERS or "attention" in name
    return not is_seeded(node) and bool(pointwise or sums or known.view or known.cheap or known.moves == "same")


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """Values made up for a segment: ``operands`` are the constants of the loop in their places, ``own`` what its steps
    read, and what else its halves take, behind these."""

    segment: Segment
    operands: list[Any]
    own: list[Any]
    constants: list[Any]
    last: list[Any]
    last_of_backward: list[Any]

    @classmethod
    def of(cls, compiled: Compiled, recurrence: Recurrence, segment: Segment) -> _Made:
        """Normal numbers, and the user's where a step reads numbers: a rate lies between 0 and 1."""
        operands = [_made(like) if i in recurrence.constants else None for i, like in enumerate(recurrence.examples)]
        constants: list[Any] = [operands[i] for i in recurrence.constants]
        once, counts = compiled.once.values(constants), compiled.watch.rows
        inputs = segment.forward_graph.graph.find_nodes(op="placeholder")
        slots = recurrence.slots(segment.steps)
        own = [_made(node.meta["val"]) for node in inputs[: slots.constants.start]]
        for places, x in slots.xs:
            if isinstance(x, Numbers):
                values, device = [*islice(cycle(x.values), segment.steps)], own[places.start].device
                own[places.start] = torch.tensor(values, dtype=x.dtype, device=device)

        def extra(half: ExtraOperands) -> list[Any]:
            return [*counts(half.counts), *(once[place] for place in half.once)]

        return cls(segment, operands, own, constants, extra(segment.extra_forward), extra(segment.extra_backward))

    def forward(self) -> list[Any]:
        """Run the segment."""
        return list(self.segment.forward([*self.own, *self.constants, *self.last]))


def _seconds(executable: Executable, segment: Segment) -> SegmentSeconds:
    made = _Made.of(executable.compiled, executable.recurrence, segment)
    forward, operands = made.forward, made.operands
    ahead = seconds_of(forward, _SHORT)
    if segment.backward is None:
        return SegmentSeconds(ahead, ahead, 0.0)
    saved = forward()[segment.outputs :]
    ends = (_made(segment.output_examples[index]) for index in segment.tangents)
    tangents = [torch.ones_like(each, memory_format=torch.contiguous_format) for each in ends]  # as they are traced
    collect, taker = _collecting(executable, segment, operands)

    def back(backward: Callable[[list[Any]], Any], thin: bool) -> float:
        given = [*segment.kept(saved, thin), *tangents, *made.last_of_backward, *taker]
        return seconds_of(lambda: collect(backward([*given])), _SHORT)

    thin = back(segment.thin.backward, thin=True) if segment.thin and thin_steps(executable.program) else 0.0
    return SegmentSeconds(ahead, ahead, back(segment.backward, thin=False), thin)


def _collecting(
    executable: Executable, segment: Segment, operands: Sequence[Any]
) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """What adds up the gradients of constants, as a backward does; those of inputs, which are as long as these, not.
    And what the backward is given for it."""
    routes = {
        steps: replace(each, slices=(), items=(), places=dict(each.constants))
        for steps, each in executable.routes.items()
    }
    gradients = Gradients(operands, routes)
    taker = [gradients.taking(0, segment.steps)] if segment.hands_over else []
    return lambda results: gradients.collect(results, 0, segment.steps), taker


def _made(like: Tensor) -> Tensor:
    """Normal numbers, or zeros where these are no floats, laid out like an example."""
    return filled(laid_out_like(like), weight_std(like) if like.dim() > 1 else 1.0)


def clocked(executable: Executable) -> dict[int, SegmentSeconds]:
    """Seconds of the segments, those of ``segment_seconds`` scaled to what the last training call took, so that what is
    done between segments is in them; where there was none, to those of another number of steps with the same segments,
    of which the first is slow, or else to what a few of them take that are played for it."""
    with executable.compiled.watch.uncounted():
        found = segment_seconds(executable)
        if background_of(executable.recurrence.examples):
            return found  # the clock does not wait for a device
        latest = executable.compiled.latest.executable
        if executable.clock.seconds is not None:
            return _as_trained(executable, found)
        if latest is not None and latest.clock.reversed > 1 and not thin_steps(latest.program):
            return _as_trained(latest, found)
        return _rehearsed(executable, found)


def _as_trained(executable: Executable, found: dict[int, SegmentSeconds]) -> dict[int, SegmentSeconds]:
    clock, steps, program = executable.clock, executable.recurrence.steps, executable.program
    assert clock.forward is not None
    assert clock.backward is not None
    again, thin = count(program, Sizes()).reforward_steps, thin_steps(program)
    ahead = work_seconds(found, "advance", steps)
    back = work_seconds(found, "backward", steps - thin) + work_seconds(found, "backward", thin, thin=True)
    rest = max(clock.backward - clock.forward * again / steps, 0.0)
    return _slower(found, clock.forward / ahead if ahead else 1.0, rest / back if back else 1.0)


def _rehearsed(executable: Executable, found: dict[int, SegmentSeconds]) -> dict[int, SegmentSeconds]:
    """The same, as slow as the longest segment is where some are played; as they are, where several in a row do not
    take made-up values, though one does."""
    alone, played = found[max(found)], None
    refused = (RuntimeError, ValueError, IndexError, MemoryError)
    with torch.no_grad(), random_numbers_kept(), values_made_up(), suppress(*refused):
        played = rehearsed(executable, alone)
    return found if played is None else _slower(found, played[0] / alone.tape, played[1] / alone.backward)


def _slower(found: dict[int, SegmentSeconds], ahead: float, back: float) -> dict[int, SegmentSeconds]:
    return {
        length: SegmentSeconds(each.forward * ahead, each.tape * ahead, each.backward * back, each.thin_backward * back)
        for length, each in found.items()
    }


def thin_steps(program: Program) -> int:
    """How many steps of a program are reversed from thin tapes."""
    if not any(is_thin(node) for graph in program.graphs for node in graph.nodes if node.target is tape):
        return 0
    return sum(each.stop - each.start for each in spelled_out(program) if each.kind == "backward" and each.thin)


def with_transfers(problem: Problem, kernels: Kernels, recurrence: Recurrence, folder: Folder) -> Problem:
    """The problem with what it costs to move a carry to its tier, in runs of a segment, and how many find room."""
    program = store_all(problem.steps, problem.segment)
    executable = Executable.of(recurrence, program, kernels.compiled)
    try:
        tier = calibrate(folder=folder).tier(problem.tier)
    except OptionError as error:  # it was there when the options were checked
        raise StorageError(f"The spill folder has vanished: {error}") from error
    return problem.moving(tier, segment_seconds(executable)[problem.segment].forward)


def with_transfers_of(problem: Problem, known: Problem) -> Problem:
    """The problem with what it costs to move carries in one that is known: as it was measured for it, else nothing."""
    return replace(problem, room=known.room, write=known.write, read=known.read)
