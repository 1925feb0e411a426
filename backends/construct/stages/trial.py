"""Compiled segments are tried on values of a call, beside the eager ones that run it.

What one segment gives, forward and backward, is compared with the user's operations in float64, on the carry, the rows
and the constants that the loop has there. It may be off by a small multiple of what the same operations are off in
their own precision, as in the accuracy tools of ``torch.compile``. One segment at a time is compared, since rounding
grows from step to step. A decision (a spike, the sign of a relu) may fall the other way where its operand is within
rounding of the threshold: what depends on one of these is found by noise on what the segment reads, and is compared no
more exactly than that leaves it. Where steps speak with other processes, all of these do the same, and what is too far
off in one of them stands for all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from reroll.backends.construct.kernels import results_of
from reroll.backends.construct.plan import Built
from reroll.backends.construct.stages.random_replay import Drawing, Noting, RandomRecord
from reroll.backends.construct.stages.seen import (
    NOISES,
    SHORT,
    distance,
    largest,
    moved,
    rounding_of,
    spread_of,
    without_noise,
)
from reroll.backends.processes.collectives import anywhere, groups_of
from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.backends.runtime.run import Run, Start
from reroll.backends.tiers.device import home_of
from reroll.graph.private import Watching
from reroll.program.program import store_all
from reroll.recurrence import Recurrence, Slices, between
from reroll.segment.joint.graph import in_parts
from reroll.segment.trace import numbers_of, step_of

LOG = logging.getLogger(__name__)
_WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
_TIMES = 16  # as far off as torch's own operations in their precision
_TIMES_SHORT = 4  # where these are in half precision, and compiled code rounds less often
_LEAST = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-11, torch.complex128: 1e-11}
_SMALL = 1e-3  # a gradient that is this small beside the largest is what rounding leaves of zero


@dataclass(slots=True, eq=False)
class Trial:
    """The compiled segments of a loop, and what came of trying them at some places of a call.

    error: the largest difference, relative to the largest entry of its tensor; own: that of torch's own operations.
    differs: what is too far off, if anything is. missed: why nothing was compared.
    """

    built: Built
    error: float = 0.0
    own: float = 0.0
    differs: str = ""
    missed: str = "no call was made yet"
    tried: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, built: Built) -> Trial:
        """That of a loop that was not tried."""
        recurrence, trial = built.executable.recurrence, cls(built)
        if home_of(recurrence.examples).type != "cpu":
            trial.tried, trial.missed = {"middle", "end"}, "it runs on a device"
        return trial

    @property
    def where(self) -> str:
        """The line of its loop."""
        return self.built.executable.recurrence.where

    @property
    def steps(self) -> int:
        """How many are tried: those of the longest segment."""
        return max(self.built.executable.compiled.segments)

    def see(self, start: int, upto: int, carries: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
        """Eager segments run the steps [start, upto), with this carry before them. Nothing is changed."""
        steps = self.built.executable.recurrence.steps
        places = {"middle": 2 * upto > steps or start + 2 * self.steps > steps, "end": upto + self.steps > steps}
        for place in (each for each, there in places.items() if there and each not in self.tried):
            if start + self.steps > steps:
                continue
            self.tried.add(place)
            try:
                self._compare(start, [each.detach() for each in (*carries, *operands[len(carries) :])])
                self.missed = ""
            except Exception as error:  # noqa: BLE001  # of a comparison beside the call, which goes on
                self._fail(error)
            return

    def _fail(self, error: Exception) -> None:
        """A comparison could not be made."""
        LOG.debug("compiled segments were not tried", exc_info=True)
        self.missed = f"{type(error).__name__}: {error}"

    def _compare(self, start: int, operands: list[Tensor]) -> None:
        piece, operands = _piece(self.built, start, self.steps, operands)
        drawn = RandomRecord() if piece.recurrence.random else None
        with random_numbers_kept() if drawn else nullcontext():
            made = _played(piece, operands, drawn)
            recurrence = replace(piece.recurrence, step=self.built.kernels.captured)
            self._judge(start, operands, made, _Reference(recurrence, made.incoming, list(made.grads), drawn))

    def _judge(self, start: int, operands: list[Tensor], made: _Made, reference: _Reference) -> None:
        exact, own = reference.run(operands, wide=True), reference.run(operands)
        found = list(_errors(made, exact, own, {}, short=reference.short))
        if self._anywhere(any(each.off > each.allowed for each in found)):
            spread = spread_of(exact.tensors(), reference.with_noise(operands))
            found = list(_errors(made, exact, own, spread, short=reference.short))
        self.error = max([self.error, *(each.off for each in found)])
        self.own = max([self.own, *(each.own for each in found)])
        worst = max(found, key=lambda each: each.off / each.allowed)
        if worst.off > worst.allowed and not self.differs:
            self.differs = (
                f"{worst.name} of {self.steps} compiled steps from step {start} on is {worst.off:.1e} off, relative to "
                f"its largest entry; at most {worst.allowed:.0e} is allowed"
            )
        unlike = reference.drawn.unlike if reference.drawn else ""
        if unlike and not self.differs:
            self.differs = (
                f"what {unlike!r} draws in {self.steps} compiled steps from step {start} on has another distribution "
                "than torch's numbers"
            )
        if self._anywhere(bool(self.differs)) and not self.differs:
            self.differs = "what is computed in another process is too far off"

    def _anywhere(self, here: bool) -> bool:
        """Whether something is so here or in a process with which the steps speak."""
        recurrence = self.built.executable.recurrence
        return anywhere(here, groups_of(recurrence.step), home_of(recurrence.examples))


class Trials:
    """Those of all loops of a program, whose calls try the compiled segments of another until ``end``."""

    def __init__(self, running: Sequence[Built], compiled: Sequence[Built]) -> None:
        self.running = {each.name: each.executable.onlookers for each in running}
        self.found = {each.name: Trial.of(each) for each in compiled if each.name in self.running}
        for name, trial in self.found.items():
            self.running[name].append(trial.see)

    def end(self) -> None:
        """Calls try nothing from here on."""
        for name, trial in self.found.items():
            self.running[name].remove(trial.see)
        self.running = {}

    @property
    def differs(self) -> str:
        """The first thing that is too far off, and where its loop is; empty if nothing is."""
        return next(
            (f"{each.differs}, in the loop at {each.where}" for each in self.found.values() if each.differs), ""
        )

    @property
    def summary(self) -> str:
        """What was compared, and how far it is off; why nothing was."""
        missed = [each for each in self.found.values() if each.missed]
        off, own = (max((getattr(each, of) for each in self.found.values()), default=0.0) for of in ("error", "own"))
        random = any(each.built.executable.recurrence.random for each in self.found.values())
        given = ", given the random numbers that they drew" if random else ""
        told = [
            f"compiled segments are those of float64 on the values of a call{given}: off by {off:.0e} at most, torch's "
            f"own operations by {own:.0e}"
        ]
        left = (f"compiled segments of the loop at {each.where} were not compared: {each.missed}" for each in missed)
        return "; ".join([*(told if len(missed) < len(self.found) else ()), *dict.fromkeys(left)])


@dataclass(frozen=True, slots=True)
class _Made:
    """Results by name, gradients by the number of their operand, and the incoming ones (None: none goes in)."""

    results: dict[str, Tensor]
    grads: dict[int, Tensor | None]
    incoming: list[Tensor | None]
    names: dict[int, str]

    def tensors(self) -> dict[str, Tensor | None]:
        """All by name, as numbers."""
        named = {f"the gradient of {self.names[at]}": each for at, each in self.grads.items()}
        return {name: each if each is None else _numbers(each) for name, each in {**self.results, **named}.items()}


def _piece(built: Built, start: int, steps: int, operands: list[Tensor]) -> tuple[Executable, list[Tensor]]:
    """Some steps of a loop as one by itself, whose tapes are kept, and its operands: of sequences what they read."""
    whole, found = built.executable.recurrence, list(operands)
    xs = [between(x, start, start + steps) for x in whole.xs]
    for number in {x.operand for x in xs if isinstance(x, Slices)}:
        read = [x for x in xs if isinstance(x, Slices) and x.operand == number]
        if len({x.dim for x in read}) > 1 or number in whole.constants:
            continue
        ends = [end for x in read for end in (x.start, x.start + (steps - 1) * x.stride)]
        low, dim = min(ends), read[0].dim
        found[number] = operands[number].narrow(dim, low, max(ends) + 1 - low)
        xs = [replace(x, start=x.start - low) if isinstance(x, Slices) and x in read else x for x in xs]
    piece = replace(whole, steps=steps, xs=tuple(xs), kept=(), peeled=(), left=0)
    program = store_all(steps, max(built.executable.compiled.segments))
    return Executable.of(piece, program, built.executable.compiled), found


def _played(piece: Executable, operands: list[Tensor], drawn: RandomRecord | None) -> _Made:
    """What compiled segments give, and the gradients of the operands that any reach, for drawn incoming ones; ``drawn``
    notes the random numbers of their own."""
    recurrence, segment = piece.recurrence, piece.compiled.segments[piece.program.segment]
    run = Run(piece, Start.of(piece, operands))
    with torch.no_grad(), Noting(drawn) if drawn else nullcontext():
        last, rows = run.forward(training=bool(segment.tangents))
        examples, generator = results_of(segment, recurrence), torch.Generator().manual_seed(0)
        likes = (*examples.last, *examples.rows)
        incoming = [
            torch.randn(each.shape, generator=generator, dtype=each.dtype) if each.requires_grad else None
            for each in likes
        ]
        grads = dict[int, Tensor | None]()
        if segment.tangents:
            alive = piece.live_operands(frozenset(i for i, grad in enumerate(incoming) if grad is not None))
            found = run.backward(incoming, keep=False)
            grads = {at: found[at] for at in sorted(alive)}
    names = (
        *(f"the carry {name!r}" for name in recurrence.carries),
        *(f"the output {name!r}" for name in recurrence.ys),
    )
    results = dict(zip(names, (*last, *rows), strict=True))
    return _Made(results, grads, incoming, _names(recurrence))


def _names(recurrence: Recurrence) -> dict[int, str]:
    """What operands are called."""
    carries, xs, constants = recurrence.inputs
    names = {number: f"{node.name!r}" for number, node in zip(recurrence.constants, constants, strict=True)}
    for node, x in zip(xs, recurrence.xs, strict=True):
        read = x.operands if hasattr(x, "operands") else (x.operand,) if isinstance(x, Slices) else ()
        names |= dict.fromkeys(read, f"{node.name!r}")
    return names | {number: f"the carry {node.name!r}" for number, node in enumerate(carries)}


@dataclass(frozen=True, slots=True)
class _Reference:
    """The user's operations of some steps, run by torch one by one, which are given the random numbers ``drawn``."""

    recurrence: Recurrence
    incoming: list[Tensor | None]
    wanted: list[int]
    drawn: RandomRecord | None

    def run(self, operands: Sequence[Tensor], *, wide: bool = False, noise: torch.Generator | None = None) -> _Made:
        """What they give, in float64 if ``wide``; with ``noise`` on random numbers."""
        recurrence, carried = self.recurrence, len(self.recurrence.carries)
        with torch.enable_grad(), recurrence.modes(), self._drawing(noise), _widening() if wide else nullcontext():
            read = {number for slot in recurrence.slots(recurrence.steps).operands for number in slot}
            leaves = [
                _leaf(each, wide and number in read, number in self.wanted) for number, each in enumerate(operands)
            ]
            carries, rows, numbers = [each.clone() for each in leaves[:carried]], [], numbers_of(recurrence)
            for step in range(recurrence.steps):
                found = recurrence.step(*step_of(recurrence, carries, leaves, numbers, step))
                carries = list(found[:carried])
                rows.append(found[carried:])
            results = [*carries, *(torch.stack(each) for each in zip(*rows, strict=True))]
            pairs = [(result, given) for result, given in zip(results, self.incoming, strict=True) if given is not None]
            ends = [(result, _widened(given) if wide else given) for result, given in pairs if result.requires_grad]
            sources = [leaves[number] for number in self.wanted]
            grads: Sequence[Tensor | None] = [None] * len(sources)
            if ends and sources:
                outputs, incoming = [each for each, _ in ends], [given for _, given in ends]
                grads = torch.autograd.grad(outputs, sources, incoming, allow_unused=True)
        names = [f"the carry {name!r}" for name in recurrence.carries] + [
            f"the output {name!r}" for name in recurrence.ys
        ]
        named = {name: each.detach() for name, each in zip(names, results, strict=True)}
        return _Made(named, dict(zip(self.wanted, grads, strict=True)), self.incoming, _names(recurrence))

    @property
    def short(self) -> bool:
        """Whether they round to half precision."""
        return rounding_of([self.recurrence]).values >= SHORT

    def with_noise(self, operands: Sequence[Tensor]) -> Iterator[dict[str, Tensor | None]]:
        """All that they give in some runs with noise on what they read."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(NOISES):
            noisy = [moved(each, generator, short=self.short) for each in operands]
            yield self.run(noisy, wide=True, noise=generator).tensors()

    @contextmanager
    def _drawing(self, noise: torch.Generator | None) -> Iterator[None]:
        if self.drawn is None:
            yield
            return
        drawing = Drawing(self.drawn, noise)
        with in_parts(), drawing:
            yield
        drawing.end()


class _Wide(Watching):
    """Whatever is done in single precision is done in double precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map_aggregate(args, _widened), **map_aggregate(kwargs or {}, _widened))


def _widening() -> AbstractContextManager[Any]:
    mode: Any = _Wide
    made: AbstractContextManager[Any] = mode()
    return made


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    return value.to(_WIDE[value.dtype]) if isinstance(value, Tensor) and value.dtype in _WIDE else value


def _numbers(value: Tensor) -> Tensor:
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.float64)


def _leaf(value: Tensor, wide: bool, wanted: bool) -> Tensor:
    made = value.detach()
    return (_widened(made) if wide else made.view_as(made)).requires_grad_(wanted)


class _Error(NamedTuple):
    """How far a tensor is off, how far it may be, and how far torch's own operations are."""

    name: str
    off: float
    allowed: float
    own: float


def _errors(
    made: _Made,
    exact: _Made,
    own: _Made,
    spread: Mapping[str, Tensor],
    *,
    short: bool,
) -> Iterator[_Error]:
    """The error of each tensor; ``short``: of a loop in half precision."""
    floor = _SMALL * max((largest(each) for each in exact.grads.values() if each is not None), default=0.0)
    expected, others = exact.tensors(), own.tensors()
    times, smallest = (_TIMES_SHORT, dict[torch.dtype, float]()) if short else (_TIMES, _LEAST)
    for name, found in without_noise(made.tensors(), expected, spread).items():
        least, want, other = floor if name not in made.results else 0.0, expected[name], others[name]
        if found is None or want is None or other is None:
            none = [each is None or not bool(each.any()) for each in (found, want)]
            off = 0.0 if all(none) or found is None else float("inf")  # a route that is left out is no rounding
            yield _Error(name, off, 1.0, 0.0)
            continue
        torchs = distance(want, other, least)
        off = min(distance(want, found, least), distance(other, found, least))
        yield _Error(name, off, max(smallest.get(found.dtype, SHORT), times * torchs), torchs)
