"""A model recorded at the length of a call, and rolled as it stands.

A branch at the middle step, ``y[T // 2:]`` or a table with an entry for each step are what they are at that length, and
nothing is said of any other one. So each new length is recorded and captured anew, as every new shape is. What was
traced, compiled and proved at other lengths is taken where it is the same (``construct.share.Known``, ``alike``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

from torch import fx

from reroll.backends.cache.settings import flags
from reroll.backends.construct.build import Conditions, Known
from reroll.backends.construct.kernels import check_policy, passes_of
from reroll.backends.construct.stages.takeover import is_aside, is_measured
from reroll.backends.dynamo.entry import Graph, Others, Program, changed_inputs, refuse_shared, rolled, sample
from reroll.backends.dynamo.garbage import SELDOM_FULL
from reroll.backends.dynamo.plain import PlainPeak
from reroll.backends.front.beside import ANEW, prove_beside, say_departed
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.calls.compile_lock import between_turns
from reroll.backends.front.full.alike import LIKE, Alike, Outline, in_words
from reroll.backends.front.full.digest import Digest
from reroll.backends.front.full.numbers import Steps
from reroll.backends.front.full.sized import Sized
from reroll.backends.front.python_state.again import Again
from reroll.backends.front.python_state.outside import TakenError
from reroll.backends.front.python_state.state import State
from reroll.backends.front.python_state.state_cache import Reach
from reroll.backends.front.recorded import AnotherAnswerError, RaisedError, Recorded, Recording
from reroll.backends.processes.collectives import check_collectives
from reroll.capture.capture import capture
from reroll.capture.recorder.graph import TooManyError, Unrecordable
from reroll.errors import ProofError, UnsupportedError, is_shortage, warn
from reroll.graph.nested import tensors_of
from reroll.planning.options import Options
from reroll.program.registry import run_on_loops
from reroll.recurrence import Capture

LOG = logging.getLogger(__name__)
HELD = 200_000
"""Operations of all records whose programs are held, 3 KB each; the last one is, however many it has."""
_PLAIN = 8  # records that are held, so that somebody may be told what plain PyTorch holds
IN_PARTS = "Give it the sequence in parts, each with the state in which the part before ended."
_WHEN_IT_COMES = "Each size is compiled when it comes."
ONE_SIZE = f"the model runs at no other size that was tried (half of a dimension of 3 or more). {_WHEN_IT_COMES}"
Found = tuple[Recording, State, Any]
"""A recording, the state of a call, and its key."""


class Missing(Enum):
    """Why there is no program of a call: its record has no loop (``NOTHING``; ``SHORT`` where it is shorter than any
    that has one), the model raised in all runs, or it does something that a record does not tell (``UNTOLD``)."""

    NOTHING = auto()
    SHORT = auto()
    RAISED = auto()
    UNTOLD = auto()


class AtLength:
    """The programs of a model, each made of its own run at the length of a call. dynamic: whether a look at another
    size is still to be had."""

    def __init__(self, model: Callable[..., Any], options: Options, *, dynamic: bool = False) -> None:
        self.model, self.options = model, options
        self.dynamic = dynamic and options.lowering != "eager"  # which serves any size
        self.recorded, self.reach, self.again = self._anew(), Reach(), Again()
        self.known, self.others = Known(), dict[Any, Others]()  # by the sizes of states
        self.alike, self.steps, self.sized = Alike(), Steps(), Sized()
        self.said = False  # that it holds more than plain PyTorch
        self.plain = deque[PlainPeak]()

    def _anew(self) -> Recorded:
        return Recorded(self.model, folds=self.options.truncate is None)  # which asks for the lines of all runs

    def found(self, call: Call) -> Found | Missing:
        """The recording of a call, or why there is none. Raises UnsupportedError for more operations than a record
        holds."""
        try:
            found = self._recording(call)
        except TooManyError as reason:
            raise UnsupportedError(f"{reason} {IN_PARTS}") from None
        except (Unrecordable, TakenError) as reason:
            LOG.info("not recorded: %s", reason)
            return Missing.RAISED if isinstance(reason, RaisedError) else Missing.UNTOLD
        program: _Program | _Nothing = found[0].run  # type: ignore[assignment]
        if isinstance(program, _Nothing):
            return Missing.SHORT if self._is_short(program) else Missing.NOTHING
        if found[0].asked and (program.written or found[0].cleared):
            LOG.info("not recorded: it updates tensors in place, which another answer to what it asks would not undo")
            return Missing.UNTOLD
        return found

    def __call__(self, call: Call, found: Found) -> Any:
        """The model's result. Raises AnotherAnswerError, before anything but random numbers has changed."""
        recording, state, key = found
        program: _Program = recording.run  # type: ignore[assignment]
        first = not program.calls
        looks = program.looks() and self.options.proof != "never"
        departed = self._another(call, recording) if looks else ""
        graph = program.next()
        if program.written:
            refuse_shared([state.tensors[index][0] for index in recording.read], program.written)
        if departed and recording.asked:
            raise AnotherAnswerError(departed)
        if departed:
            graph.proof.renew(graph.plans, graph.run, departed)
        if not is_aside() and (departed or (graph.proof.due and self._proves(recording))):
            self._prove(call, recording, departed)
        self.again.note((call.sizes(), program.operations) if first else None, key, looked=first)
        with between_turns():
            return recording.replay(state)

    def _is_short(self, nothing: _Nothing) -> bool:
        programs = [each.run for each in self.recorded.recordings.values() if isinstance(each.run, _Program)]
        return bool(programs) and nothing.size < min(each.operations for each in programs)

    def _recording(self, call: Call) -> Found:
        made = partial(self._made, call)
        return self.recorded.recording(self.reach, call, made)

    def _made(self, call: Call, module: fx.GraphModule) -> _Program | _Nothing:
        """The program of a record, in place of those that came longest ago where all are more than are held."""
        held = self.recorded.recordings
        digest = Digest.of(module.graph)
        left = HELD - len(digest.numbers)
        while held and sum(each.run.operations for each in held.values()) > left:  # type: ignore[attr-defined]
            held.popitem(last=False)
        with SELDOM_FULL:
            found = self._captured(module)
            if not found.recurrences:
                reason = f"reroll.compile found no recurrence at this length: {found.reason}."
                LOG.info(reason)
                return _Nothing(reason, len(digest.numbers))
            self.sized.note(found.recurrences)
            found = self.steps.lifted(found)
            check_policy(found.recurrences, self.options)
            check_collectives(found.recurrences, self.options)
            others = self.others.setdefault(_states(found), Others(self.known))
            if self.dynamic:
                self._sample(call, found, others)
            program = rolled(module, found, self.options, others=others, conditions=self._conditions(call))
            made = _Program(program, digest)
            self._say_more(made.graph)
            self._forget_records(made.graph)
        return made

    def _forget_records(self, graph: Graph) -> None:
        """Hold the records of the last programs alone: a record takes most of what a program does."""
        self.plain.append(graph.plain)
        if len(self.plain) > _PLAIN:
            self.plain.popleft().forget()

    def _say_more(self, graph: Graph) -> None:
        """Say once that a program holds more than plain PyTorch."""
        if not self.said and (more := graph.more_than_plain()):
            self.said = True
            warn(more)

    def _sample(self, call: Call, found: Capture, others: Others) -> None:
        """Record a call at another size, such as that of a batch, so that what is compiled for the loops serves any."""
        self.dynamic = False
        if reason := only_here(call):
            warn(f"dynamic=True: {reason}")
            return
        for other in call.other_sizes():
            with suppress(Exception):  # of sizes that the model is not made for
                sized = self._captured(self.recorded.record(other, self.reach.ran)[0])
                if _kinds(sized) == _kinds(found) and _states(sized) != _states(found):
                    sample(sized, self.options, others)
                    return
        warn(f"dynamic=True: {ONE_SIZE}")

    def _conditions(self, call: Call) -> Conditions:
        """What kernels of a call's record depend on beside the steps that they are made of: a function of the user's
        own may read whatever the model's code names, which is known once it has run."""
        key = self.reach.noted(self.model, call.args, call.kwargs)[1]
        return Conditions((key.modes, repr(flags())), (key.readable, self.recorded.applied()))

    def _captured(self, module: fx.GraphModule) -> Capture:
        """The recurrences of a record; none where only blocks are, and gradients are to be cut over time."""
        cut = self.options.truncate is not None
        passes, search = passes_of(self.options), partial(capture, module, depth=self.options.depth, iterations=cut)
        found = run_on_loops(passes, search(maps=True), module)
        if found.recurrences and not any(each.carries for each in found.recurrences):  # layers side by side, perhaps
            found = run_on_loops(passes, search(), module)
        if cut and all(each.blocks for each in found.recurrences):
            return replace(found, recurrences=())
        return found

    def _another(self, call: Call, recording: Recording) -> str:
        """Where another record of a call says something else; empty where it does not. Raises what the model does."""
        program: _Program = recording.run  # type: ignore[assignment]
        try:
            module, made = self.recorded.record(call, self.reach.ran)
        except RaisedError as error:
            raise error.__cause__ or error from None
        except Unrecordable as reason:
            return str(reason)
        except Exception as error:
            if not is_shortage(error):
                raise
            LOG.info("not looked at: %s", error)
            return ""
        again, digest = made(recording.run), Digest.of(module.graph)
        departed = program.digest.departure(digest, module.graph)
        if not departed and (recording.read, in_words(recording)) != (again.read, in_words(again)):
            departed = "It gives or changes something else."
        program.digest = digest
        return departed

    def _proves(self, recording: Recording) -> bool:
        """Whether a program whose proof is due is proved: not where programs like it were, at other lengths."""
        program: _Program = recording.run  # type: ignore[assignment]
        proof = program.graph.proof
        if proof.how == "always" or program.likened:
            return True
        program.likened = True
        proves = self.alike.due(program.graph, Outline.of(program.graph, recording))
        if not proves:
            proof.leave(LIKE)
        return proves

    def _prove(self, call: Call, recording: Recording, departed: str) -> None:
        """Prove the program of a call, before it runs. Raises ProofError."""
        program: _Program = recording.run  # type: ignore[assignment]

        def again(apart: Call, run: Callable[..., Any]) -> Any:
            same, state, _ = self._recording(apart)
            if same is not recording:
                raise UnsupportedError(ANEW)
            return same.replay(state, run)

        def another() -> str:
            return "" if departed else self._another(call, recording)

        try:
            prove_beside(self.model, call, program.graph.proof, again, another, self.reach.ran.functions)
        except ProofError:
            if departed:  # what is known of the model is of what it was: a later call looks at it anew
                self.recorded, self.reach = self._anew(), Reach()
            raise
        if not departed and program.graph.proof.whole:
            self.alike.note(program.graph, Outline.of(program.graph, recording))
        say_departed(departed, program.graph.proof)


def only_here(call: Call) -> str:
    """Why code that is compiled for a call serves its sizes alone; empty where it may serve any."""
    devices = {value.device.type for value in tensors_of((call.args, call.kwargs))}
    if devices == {"cpu"}:
        return ""
    return f"code for any size is made for CPUs, and here is {', '.join(sorted(devices))}. {_WHEN_IT_COMES}"


def _kinds(found: Capture) -> Any:
    """Where loops are, and of how many steps: equal at sizes that say nothing of these."""
    return [(each.where, each.steps, len(each.step.graph.nodes)) for each in found.recurrences]


def _states(found: Capture) -> Any:
    """The sizes of what loops carry, which are those of a batch."""
    loops = found.recurrences
    return tuple(tuple(tuple(value.shape) for value in loop.examples[: len(loop.carries)]) for loop in loops)


@dataclass(frozen=True, slots=True)
class _Nothing:
    """What a record without a loop is held as, with why it has none, and how many operations it had."""

    reason: str
    size: int
    operations: int = 0

    def __call__(self, *args: Any) -> Any:
        """It is not run."""
        raise AssertionError(self.reason)


class _Program(Program):
    """The program of a record. ``digest``: of the last record that the program was found to be of, or not; ``calls``
    that it had; ``likened``: whether it was compared with others that were proved."""

    def __init__(self, program: Program, digest: Digest) -> None:
        super().__init__(program.graph, program.takeover, program.make)
        self.written, self.calls, self.digest = changed_inputs(program.graph.module.graph), 0, digest
        self.operations, self.likened = len(digest.numbers), False

    def looks(self) -> bool:
        """Count a call; whether the model is looked at again in it: the 2nd, 4th, 8th ... one."""
        if self.calls and (is_aside() or is_measured()):
            return False
        self.calls += 1
        return self.calls > 1 and self.calls & (self.calls - 1) == 0

    def __call__(self, *args: Any) -> Any:
        """Run the call that has come next."""
        return self.run(*args)
