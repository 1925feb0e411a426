"""Plays a training program: the forward half up to ``turn``, later the backward half.

One ``Run`` is one call of one recurrence. It holds the values that the program keeps, and nothing of it outlives the
autograd graph of the call. A carry is made in the forward register and is gone when the next segment runs, unless it
was saved; random number states travel with the carries that are kept. The first run of a step draws from torch's
generators, and what runs again from a generator of its own.

``Start`` is a call before its first step: from there it can be played as often as need be.

torch.profiler shows what a program does under the kinds of its instructions, and segments inside them: a few rows for
any number of steps. Which instruction and which steps it was are arguments, with ``record_shapes=True``. Private torch
API, tried on 2.11 and 2.13: ``_is_profiler_enabled``, a flag that is made for checks like this one
(``record_function`` alone takes microseconds when no profiler runs), and ``_RecordFunctionFast``, which takes arguments
that the trace shows; those of ``record_function`` are shown nowhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import profiler

from reroll.backends.codecs.codec import Encoded, encode
from reroll.backends.inductor.lower import ExtraOperands, Segment
from reroll.backends.inductor.wrapper_codegen.threads import no_more_threads_than_cores
from reroll.backends.runtime.executable import Executable, Instruction
from reroll.backends.runtime.gradients import Gradients
from reroll.backends.runtime.randomness import (
    OwnNumbers,
    device_states,
    random_state,
    set_device_states,
    set_random_state,
)
from reroll.backends.runtime.replay_check import Witness
from reroll.backends.runtime.values import Carry, Kept, Reloaded, Stored, Tape, Unpacked
from reroll.backends.tiers.mapped import forbid_cut_files
from reroll.errors import UnsupportedError
from reroll.program.program import Node, advance, backward, offload, recompute, reload, reverse, save, tape, turn
from reroll.program.spelled import kind_of
from reroll.program.writing import name_at
from reroll.recurrence import RowSteps, Slices
from reroll.segment.trace import packed, step_inputs

_FIRST, _AGAIN, _REVERSED = "segment forward", "segment replay", "segment backward"
_UNSEEN = nullcontext()


class Run:
    """One call of a recurrence.

    ``values`` of instructions: a ``Tape`` of a tape, a ``Kept`` carry of a save or a pick, a ``Stored`` block of an
    offload, a ``Reloaded`` one of a reload, the gradients of a carry of a turn, a backward or a reverse.
    """

    def __init__(self, executable: Executable, start: Start) -> None:
        self.executable, self.start = executable, start
        self.own: OwnNumbers | None = None
        self.loop = executable.recurrence.name
        self.operands = start.operands
        self.values: dict[Node, Any] = {}
        self.register: tuple[Node, Carry] | None = None
        self.last = Carry(())
        self.frontier = 0
        self.origin = 0
        self.keep = False
        self.ys: list[Tensor] = []
        self.output_grads: Sequence[Tensor | None] = ()
        self.grads = Gradients(self.operands, executable.routes)
        self.fixed: Mapping[int, tuple[list[Tensor], list[Tensor]]] = {}

    # The two halves.

    def forward(self, training: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Play the forward half, or only run the steps if not ``training``. Gives the last carry and the outputs."""
        recurrence = self.executable.recurrence
        forbid_cut_files(self._sequences(), recurrence.where)
        self.ys = [] if self.frontier else self.executable.empty_outputs()
        initial = Carry(self.operands[: len(recurrence.carries)])
        placeholder = self.executable.program.graph.find_nodes(op="placeholder")[0]
        self.register = (placeholder, initial)
        compiled, instructions = self.executable.compiled, self.executable.instructions
        with compiled.graphs.using(), compiled.watch.counting(afresh=True), _layouts_checked(recurrence.where):
            self.fixed = self._fixed()
            if training:
                with self.executable.clock.timing("forward"):
                    for instruction in instructions.forward:
                        self._play(instruction)
            else:
                self.last = self._run(placeholder, 0, recurrence.steps, None)
            last, ys = [tensor.clone() for tensor in self.last.tensors], self.ys
        self.ys, self.fixed, self.register, self.last = [], {}, None, Carry(())
        return last, ys

    def backward(self, grads: Sequence[Tensor | None], keep: bool) -> list[Tensor | None]:
        """Play the backward half. Gives one gradient per operand. With ``keep`` the run can be reversed again."""
        forbid_cut_files(self._sequences(), self.executable.recurrence.where)
        run = self._fork() if keep else self
        run.keep = keep
        carried = len(self.executable.recurrence.carries)
        run.output_grads = grads[carried:]
        devices = device_states(self.operands) if self.executable.recurrence.random else ()
        if self.start.random is not None:
            run.own = OwnNumbers(self.start.random)
        compiled, instructions, clock = self.executable.compiled, self.executable.instructions, self.executable.clock
        run.values[instructions.forward[-1].node] = list(grads[:carried])
        layouts = _layouts_checked(self.executable.recurrence.where)
        try:
            with compiled.graphs.using(), compiled.watch.counting(afresh=False), clock.timing("backward"), layouts:
                for tier in self.executable.tiers.values():
                    tier.settle()
                run.fixed = self._fixed()
                for instruction in instructions.backward:
                    run._play(instruction)
            final = run.values[instructions.backward[-1].node]
        finally:
            run.values.clear()
            run.register, run.output_grads, run.fixed, run.origin = None, (), {}, 0
            set_device_states(devices)
        alive = self.executable.live_operands(frozenset(i for i, grad in enumerate(grads) if grad is not None))
        found = [*_own_memory(final, grads), *(run.grads.pop(i) for i in range(carried, len(self.operands)))]
        return [grad if operand in alive else None for operand, grad in enumerate(found)]

    def _sequences(self) -> list[Tensor]:
        """The operands of which each step reads a part."""
        return [self.operands[x.operand] for x in self.executable.recurrence.xs if isinstance(x, Slices)]

    def _fixed(self) -> Mapping[int, tuple[list[Tensor], list[Tensor]]]:
        """For each length of segments the last operands of its halves, the same for all: constants of the loop (given
        to the forward alone), rows to count in, and what is made of constants; it is not kept between the halves."""
        compiled, hold = self.executable.compiled, self.executable.compiled.graphs.hold
        constants = [self.operands[i] for i in self.executable.recurrence.constants]
        once = hold("once", compiled.once.values(constants))
        constants = hold("constant", constants)

        def extra(numbers: ExtraOperands) -> list[Tensor]:
            return [*compiled.watch.rows(numbers.counts), *(once[place] for place in numbers.once)]

        return {
            steps: ([*constants, *extra(segment.extra_forward)], extra(segment.extra_backward))
            for steps, segment in compiled.segments.items()
        }

    def _fork(self) -> Run:
        fork = Run(self.executable, self.start)
        fork.values, fork.frontier = dict(self.values), self.frontier
        return fork

    def _play(self, instruction: Instruction) -> None:
        node = instruction.node
        if node.target is reverse:
            self._reverse(instruction)
            return
        with ranged(self.loop, kind_of(node), _instruction, node, self.origin):
            result = _HANDLERS[node.target](self, node, *node.args, **node.kwargs)  # type: ignore[index]
        if result is not None:
            self.values[node] = result
        for dead in instruction.dead:
            self.values.pop(dead, None)

    def _reverse(self, instruction: Instruction) -> None:
        """Play a part. Steps are counted from its start, and what nobody needs afterwards it holds alone."""
        source, grad, name, at = cast(tuple[Any, ...], instruction.node.args)
        part = self.executable.instructions.parts[name]
        self.values[part.carry], self.values[part.grad] = self.values[source], self.values[grad]
        for dead in instruction.dead:
            self.values.pop(dead, None)
        self.origin += at
        for each in part.instructions:
            self._play(each)
        self.origin -= at
        self.values[instruction.node] = self.values.pop(part.result)

    # Instructions: each is given its own node, then its operands, which are nodes of the program.

    def _advance(self, node: Node, source: Node, start: int, stop: int) -> None:
        self.register = (node, self._run(source, start, stop, None))

    def _tape(self, node: Node, source: Node, start: int, stop: int, thin: bool = False) -> Tape:
        instructions = self.executable.instructions
        taped = Tape(passing=node in instructions.passing, unread=node in instructions.unread, thin=thin)
        carry = self._run(source, start, stop, taped)
        self.register = None if taped.unread else (node, carry)
        return taped

    def _save(self, node: Node, source: Node, codec: tuple[str, ...] = ()) -> Kept:
        carry = self._carry(source)
        first = source.op == "placeholder" and not codec  # is there anyway
        return Kept(self._encoded(carry, codec, counted=not first), self._random(carry))

    def _offload(self, node: Node, sources: Sequence[Node], tier: str, codec: tuple[str, ...] = ()) -> Stored:
        carries = [self._carry(source) for source in sources]
        values = [tensor for carry in carries for tensor in self._encoded(carry, codec)]
        block = self.executable.tiers[tier].write(values)
        return Stored(block, len(carries[0].tensors), tuple(self._random(carry) for carry in carries))

    def _reload(self, node: Node, source: Node) -> Reloaded:
        stored: Stored = self.values[source]
        stored.block.prefetch()
        return Reloaded(stored)

    def _pick(self, node: Node, source: Node, index: int) -> Kept:
        block: Reloaded = self.values[source]
        if block.source is not None:
            self.values[source] = block = Reloaded(None, block.source.read())
        kept = block.carries[index]
        if kept is None:
            raise AssertionError("a carry is picked after its last pick")
        if len([user for user in source.users if user.args[1] == index]) == 1:
            block.carries[index] = None  # freed as soon as this carry is
        return kept

    def _turn(self, node: Node, source: Node) -> None:
        self.last = self._carry(source)

    # Running segments.

    def _carry(self, source: Any) -> Carry:
        if self.register is not None and self.register[0] is source:
            return self.register[1]
        kept: Kept = self.values[source]
        return kept.carry()

    def _random(self, carry: Carry) -> tuple[Tensor, ...] | None:
        if not self.executable.recurrence.random:
            return None
        if carry.random is not None:
            return carry.random
        return self.own.state(self.operands) if self.own else random_state(self.operands)

    def _encoded(self, carry: Carry, codec: tuple[str, ...], *, counted: bool = True) -> tuple[Encoded, ...]:
        names = codec or ("raw",) * len(carry.tensors)
        pairs = zip(carry.tensors, names, strict=True)
        kept = tuple(encode(tensor, name, copy=False, proved=carry.made) for tensor, name in pairs)
        if counted:
            self.executable.ledger.enter(kept)
        return kept

    def _run(self, source: Node, start: int, stop: int, taped: Tape | None) -> Carry:
        carry, start, stop = self._carry(source), self.origin + start, self.origin + stop
        if carry.random is not None:
            if self.own is None:
                raise AssertionError("a carry that was kept is run from in a backward pass")
            self.own.start(carry.random)
        tensors, width, self.register = carry.tensors, len(carry.tensors), None
        segments = self.executable.compiled.segments
        del carry
        for steps in self.executable.lengths(start, stop):
            segment = segments[steps]
            for onlooker in self.executable.onlookers if start >= self.frontier else ():
                onlooker(start, start + steps, tensors, self.operands)
            inputs, unpacked = self._inputs(tensors, start, steps)
            del tensors
            lasting = taped is not None and not taped.passing
            alone = taped is not None and taped.unread and start + steps == stop
            drawing = _UNSEEN if self.own is None else self.own.drawing()
            with drawing, ranged(self.loop, _FIRST if start >= self.frontier else _AGAIN, _steps, start, steps):
                results = self.executable.run_forward(segment, inputs, lasting=lasting, alone=alone)
            tensors = tuple(results[:width])
            if start >= self.frontier:
                self._emit(start, steps, results[width : segment.outputs])
            saved = results[segment.outputs :]
            for number, rows in unpacked.items():
                saved[number] = rows
            del results
            start += steps
            if self.start.witness is not None:
                self.start.witness.see(start, tensors)
            if taped is not None:
                taped.segments.append((start - steps, steps, segment.kept(saved, taped.thin)))
            del saved
        return Carry(tensors, made=True)

    def _inputs(self, carry: Sequence[Tensor], start: int, steps: int) -> tuple[list[Any], dict[int, Unpacked]]:
        """What a segment reads; and rows that had to be copied for it, by their numbers among what it saves."""
        recurrence, rows = self.executable.recurrence, self.executable.rows[steps]
        inputs = [*carry, *step_inputs(recurrence, self.operands, self.executable.numbers, start, steps)]
        views = {place: inputs[place] for place in rows.places}
        for place, view in views.items():
            inputs[place] = packed(view)
        copied = {number: Unpacked(views[at]) for number, at in rows.saved if inputs[at] is not views[at]}
        return [*inputs, *self.fixed[steps][0]], copied

    def _emit(self, start: int, steps: int, rows: Sequence[Tensor]) -> None:
        for buffer, row, kept in zip(self.ys, rows, self.executable.recurrence.kept_rows, strict=True):
            places, taken = kept.among(start, steps)
            buffer[places].copy_(row[taken])
        self.frontier = start + steps

    def _backward(self, node: Node, source: Node, grad: Node) -> list[Tensor | None]:
        taped: Tape = self.values[source]
        carried: list[Tensor | None] = list(self.values[grad])
        pieces = list(taped.segments) if self.keep else taped.segments
        segments = self.executable.compiled.segments
        while pieces:
            start, steps, saved = pieces.pop()
            segment = segments[steps]
            if segment.backward is None:
                return [None] * len(carried)
            tangents = self._tangents(segment, carried, start, steps)
            saved_again = (packed(each.rows) if isinstance(each, Unpacked) else each for each in saved)
            taker = [self.grads.taking(start, steps)] if segment.hands_over else []
            arguments: list[Any] = [*saved_again, *tangents, *self.fixed[steps][1], *taker]
            if not self.keep:
                saved.clear()
            del tangents, saved
            with ranged(self.loop, _REVERSED, _steps, start, steps):
                results = self.executable.run_backward(segment, arguments, taped.thin)
            carried = self.executable.passed_on(self.grads.collect(results, start, steps), start)
            del results  # the gradients of constants have been added: free them before the next segment runs
            carried = [grad if grad is None else grad.contiguous() for grad in carried]  # a part would hold the whole
        return carried

    def _tangents(self, segment: Segment, carried: Sequence[Tensor | None], start: int, steps: int) -> list[Tensor]:
        found, width, rows = [], len(carried), self.executable.recurrence.kept_rows
        for index in segment.tangents:
            grad = carried[index] if index < width else self.output_grads[index - width]
            like = segment.output_examples[index]
            if grad is not None and index >= width:
                grad = _of_steps(grad, like, rows[index - width], start, steps)
            found.append(
                torch.zeros(like.shape, dtype=like.dtype, device=like.device) if grad is None else grad.contiguous()
            )
        return found


def _own_memory(found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of first carries, in memory of their own: where a carry passes through, its gradient is the incoming
    one, which may be the user's. Autograd would take it for ``grad`` of a leaf, and later add to it."""
    taken = {grad.untyped_storage().data_ptr() for grad in given if grad is not None}
    own = list[Tensor | None]()
    for grad in found:
        if grad is not None and grad.untyped_storage().data_ptr() in taken:
            grad = grad.clone()
        own.append(grad)
        taken |= set() if grad is None else {grad.untyped_storage().data_ptr()}
    return own


def _of_steps(grad: Tensor, like: Tensor, kept: RowSteps, start: int, steps: int) -> Tensor:
    """The gradient of the rows of some steps: zeros for those that are not kept, as the slice of all rows gives them in
    eager, too."""
    places, taken = kept.among(start, steps)
    if kept.whole:
        return grad[places]
    made = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    made[taken] = grad[places]
    return made


_HANDLERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    advance: Run._advance,
    recompute: Run._advance,
    tape: Run._tape,
    save: Run._save,
    offload: Run._offload,
    reload: Run._reload,
    operator.getitem: Run._pick,
    turn: Run._turn,
    backward: Run._backward,
}


def again(executable: Executable, start: Start) -> Run:
    """A run of a call that has given its results already, with its forward half played once more."""
    run = Run(executable, start)
    run.frontier = executable.recurrence.steps
    devices = device_states(start.operands) if start.random is not None else ()
    if start.random is not None:
        run.own = OwnNumbers(start.random)
    try:
        run.forward(training=True)
    finally:
        set_device_states(devices)
    return run


def border(executable: Executable, start: Start, own: OwnNumbers | None) -> tuple[tuple[Tensor, ...], int]:
    """The carries before the last segment of a call that has run already, and at which step that is."""
    recurrence, compiled = executable.recurrence, executable.compiled
    run, first = Run(executable, start), executable.program.graph.find_nodes(op="placeholder")[0]
    run.frontier, run.own = recurrence.steps, own
    run.register = (first, Carry(start.operands[: len(recurrence.carries)]))
    at = recurrence.steps - executable.lengths(0, recurrence.steps)[-1]
    with compiled.graphs.using(), compiled.watch.counting(afresh=False), _layouts_checked(recurrence.where):
        run.fixed = run._fixed()
        return tuple(tensor.clone() for tensor in run._run(first, 0, at, None).tensors), at


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The operands of a call, the random numbers with which it begins (None: it draws none), and who compares carries
    that are reached again (``verify``)."""

    operands: tuple[Tensor, ...]
    random: tuple[Tensor, ...] | None
    witness: Witness | None

    @classmethod
    def of(cls, executable: Executable, operands: Sequence[Tensor]) -> Start:
        """A call that begins now."""
        recurrence = executable.recurrence
        random = random_state(operands) if recurrence.random else None
        return cls(tuple(operands), random, Witness(recurrence) if executable.verify else None)

    def rewind(self) -> None:
        """Put back the random numbers with which the call began."""
        if self.random is not None:
            set_random_state(self.random)


def ranged(loop: str, what: str, arguments: Callable[..., dict[str, Any]], *args: Any) -> AbstractContextManager[Any]:
    """A context that torch.profiler shows as "reroll: <loop> <what>", with what ``arguments`` makes of ``args``; it is
    not asked for where no profiler runs."""
    if not profiler._is_profiler_enabled:
        return _UNSEEN
    return torch._C._profiler._RecordFunctionFast(f"reroll: {loop} {what}", (), arguments(*args))


def _instruction(node: Node, origin: int) -> dict[str, Any]:
    return {"instruction": name_at(node, origin)}


def _steps(start: int, steps: int) -> dict[str, Any]:
    return {"start": start, "stop": start + steps}


@contextmanager
def _layouts_checked(where: str) -> Iterator[None]:
    """Inside, that inductor's check of layouts stops a segment is an UnsupportedError, which says so."""
    try:
        yield
    except AssertionError as error:
        if not str(error).startswith("expected size"):
            raise
        raise UnsupportedError(
            f"A compiled segment of the loop at {where} has made a value in another layout than torch had said "
            f"({str(error).splitlines()[0]}). Use lowering='eager', and please report it, with the model."
        ) from error


@contextmanager
def as_traced(operands: Sequence[Tensor]) -> Iterator[None]:
    """Without autocast, on all devices of the operands that have one (not `meta`): what it does is in the segments
    already. Torch has no more threads than there are cores."""
    with ExitStack() as stack:
        stack.enter_context(no_more_threads_than_cores())
        for kind in filter(torch.amp.is_autocast_available, sorted({operand.device.type for operand in operands})):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
