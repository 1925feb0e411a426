"""A model recorded at the length of a call, and rolled as it stands: for what no short run of it tells.

A branch at the middle step, ``y[T // 2:]`` or a table with an entry for each step are what they are at that length, and
nothing is said of any other one. So each new length is recorded, captured and traced anew, as every new shape is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from reroll.backends.construct.kernels import check_policy
from reroll.backends.construct.stages.takeover import is_aside
from reroll.backends.dynamo.entry import Program, changed_inputs, refuse_shared, rolled
from reroll.backends.dynamo.garbage import SELDOM_FULL
from reroll.backends.dynamo.plain import say_more
from reroll.backends.front.arguments import Call
from reroll.backends.front.beside import prove_beside
from reroll.backends.front.held.again import Again
from reroll.backends.front.held.reach import Reach
from reroll.backends.front.held.state import State
from reroll.backends.front.recorded import Recorded, Recording
from reroll.backends.front.turns import between_turns
from reroll.backends.processes.together import check_together
from reroll.capture.capture import capture
from reroll.capture.fusion.fuse import fuse
from reroll.capture.recorder.graph import Unrecordable
from reroll.capture.recorder.ragged import LONGEST
from reroll.errors import NoRecurrenceError, UnsupportedError, is_shortage
from reroll.graph.lines import where
from reroll.planning.options import Options

LOG = logging.getLogger(__name__)


class AtLength:
    """Calls a model by programs that are made of its own runs, each at the length of a call.

    nothing: whether nothing repeated in the last run that was recorded.
    """

    def __init__(self, model: Callable[..., Any], options: Options) -> None:
        self.model, self.options = model, options
        self.recorded, self.reach, self.again = Recorded(model), Reach(), Again()
        self.nothing = False

    def rolls(self, call: Call) -> bool:
        """Whether a call can be recorded, and has a loop."""
        self.nothing = False
        try:
            self._recording(call)
        except (Unrecordable, NoRecurrenceError) as reason:
            LOG.info("not recorded at its full length: %s", reason)
            self.nothing = isinstance(reason, NoRecurrenceError)
            return False
        return True

    def __call__(self, call: Call) -> Any:
        """The model's result. Raises Unrecordable, and NoRecurrenceError where nothing repeats."""
        recording, state, key = self._recording(call)
        program: _Program = recording.run  # type: ignore[assignment]
        program.calls += 1
        if program.calls > 1:
            self._look_again(call, program)
        graph = program.next()
        if program.written:
            refuse_shared([state.tensors[index][0] for index in recording.read], program.written)
        if graph.proof.due and not is_aside():

            def again(apart: Call, run: Callable[..., Any]) -> Any:
                same, copied, _ = self._recording(apart)
                if same is not recording:
                    raise UnsupportedError(
                        "The model is looked at anew for copies of the inputs, such as of expanded ones."
                    )
                return same.replay(copied, run)

            prove_beside(self.model, call, graph.proof, again, writes=bool(program.written))
        self.again.note(call.length, key, looked=program.calls == 1)
        with between_turns():
            return recording.replay(state)

    def _recording(self, call: Call) -> tuple[Recording, State, Any]:
        found = self.recorded.recording(self.reach, call.args, call.kwargs, lambda: call, self._made)
        asked = [line for line, _ in found[0].asked if not line.endswith(LONGEST)]
        if asked:
            raise Unrecordable(f"The model asks whether values are true, at {asked[0]}.")
        return found

    def _made(self, module: fx.GraphModule, _: Sequence[Any]) -> _Program:
        """The program of a record."""
        with SELDOM_FULL:
            cut = self.options.truncate is not None
            found = fuse(capture(module, maps=True, iterations=cut))
            if not any(each.carries for each in found.recurrences):
                found = fuse(capture(module, depth=True, iterations=cut))
            if not found.recurrences:
                raise NoRecurrenceError(f"reroll found no recurrence: {found.reason}.")
            check_policy(found.recurrences, self.options)
            check_together(found.recurrences, self.options)
            made = _Program(rolled(module, found, self.options), module.graph)
            say_more(made.graph.more_than_plain())
        return made

    def _look_again(self, call: Call, program: _Program) -> None:
        """See at the 2nd, 4th, 8th call of a program whether the model still does what was recorded; what it does
        otherwise has its program proved anew."""
        if program.calls & (program.calls - 1) or is_aside() or self.options.proof == "never":
            return
        try:
            module, _ = self.recorded.record(call, self.reach.ran)
        except Exception as error:
            if not is_shortage(error):
                raise
            LOG.info("not looked at again: %s", error)
            return
        if departed := program.departure(module.graph):
            program.graph.proof.renew(program.graph.plans, program.graph.run, departed)


class _Program(Program):
    """The program of a record. ``calls`` that it had; ``told``: its operations, to compare others with."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        super().__init__(program.graph, program.takeover, program.make)
        self.written, self.told, self.calls = changed_inputs(program.graph.module.graph), _told(graph), 0

    def __call__(self, *args: Any) -> Any:
        """Run the call that has come next."""
        return self.run(*args)

    def departure(self, graph: fx.Graph) -> str:
        """Where another record of the same call does something else; empty where it does not."""
        again, nodes = _told(graph), list(graph.nodes)
        at = next((at for at, pair in enumerate(zip(self.told, again, strict=False)) if pair[0] != pair[1]), -1)
        if at < 0 and len(again) == len(self.told):
            return ""
        return f"It does something else at {where(nodes[at])}."


def _told(graph: fx.Graph) -> list[int]:
    """A number for each operation of a graph, which is the same where the operation, its operands and what they are."""
    numbers = {node: f"node {number}" for number, node in enumerate(graph.nodes)}
    operands = (fx.map_arg((node.args, node.kwargs), lambda each: numbers[each]) for node in numbers)
    return [hash((node.op, node.target, repr(each))) for node, each in zip(numbers, operands, strict=True)]
