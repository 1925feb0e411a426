"""What calls a compiled model: by a record of the call, or else as Dynamo reads it.

A call is recorded at its own length (``at_length``), and blocks over depth count as steps too. What a record does not
tell (it prints, asks for values, reads files, speaks with other processes), and what has no loop, is what
``torch.compile(model, backend="reroll")`` makes of it, which may cut it into several graphs. A call in which the model
raises is the plain model's, and the next one is recorded as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from reroll.backends.construct.stages.takeover import is_aside
from reroll.backends.dynamo.entry import read
from reroll.backends.dynamo.unguarded import unseen_hooks
from reroll.backends.front.beside import UnsteadyError
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.calls.plainly import InTurn
from reroll.backends.front.full.at_length import AtLength, Found, Missing
from reroll.backends.front.python_state.state import unsized
from reroll.backends.front.reading import Reading
from reroll.backends.front.recorded import AnotherAnswerError
from reroll.backends.progress import tell
from reroll.backends.runtime.randomness import random_state, set_random_state
from reroll.capture.recorder.identity import Same
from reroll.errors import warn
from reroll.planning.options import Options

_OTHERWISE = (
    "From the first other answer on Dynamo reads the model, and cuts its graph at each such line: a loop with one in "
    "it is not rolled then. torch.where in place of the branch keeps it rolled."
)


class Caller(InTurn):
    """Calls a compiled model."""

    def __init__(self, model: Callable[..., Any], options: Mapping[str, Any], *, dynamic: bool = False) -> None:
        self.model, self.options = model, Options.of(options)
        self.at_length = AtLength(model, self.options, dynamic=dynamic)
        self.reading = Reading(self.at_length.recorded, self.options)
        self.given, self.reads = options, dict[tuple[Same, ...], Any]()
        self._read()  # torch.compile leaves a mark on the model, which no call is to leave
        self.has_sizes = self.told_short = False
        self.is_read = self.told = False  # by Dynamo, from the first call on that needs it; of what it asks

    def _begun(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        if not self.has_sizes and not self._has_sizes():
            return partial(self.model, *args, **kwargs)
        call = Call(tuple(args), dict(kwargs))
        if not self.is_read:
            found = self.at_length.found(call)
            if found is Missing.RAISED:
                return partial(self._raised, args, kwargs)
            if found is Missing.SHORT and self._may_be_plain():
                self._say_short()
                return partial(self.model, *args, **kwargs)
            self.is_read = found is Missing.UNTOLD
            results = [] if isinstance(found, Missing) else self._played(call, found)
            if results:
                return results.pop
        run = self._read()
        if self.is_read:
            run = self.reading.runs(call, run, self.at_length.reach.ran)
        return partial(run, *args, **kwargs)

    def _read(self) -> Callable[..., Any]:
        """The model as Dynamo reads it: anew for other hooks of all modules, as its guards do not see them."""
        hooks = unseen_hooks()
        if hooks not in self.reads:
            run = read(self.model, self.given)
            self.reads[hooks] = run.forward if isinstance(run, nn.Module) else run  # which calls none
        found: Callable[..., Any] = self.reads[hooks]
        return found

    def _has_sizes(self) -> bool:
        """Whether all parameters have sizes: those of lazy modules have none before they are called."""
        without = unsized(self.model)
        self.has_sizes = not without
        if without:
            tell(f"{without} has no size yet, so this call runs as plain PyTorch, and the next one is looked at")
        return self.has_sizes

    def _may_be_plain(self) -> bool:
        """Whether the model itself is what a sequence of one or two steps runs: compiling these takes longer, and their
        gradients would be zeros where the model's are None."""
        asked = self.options.truncate is not None or self.options.on_no_recurrence == "error"
        return not asked and not is_aside()

    def _say_short(self) -> None:
        """Say once that a sequence has no loop which is shorter than those that have one."""
        if not self.told_short:
            self.told_short = True
            tell("a sequence shorter than those before has no steps that repeat, so its call runs as plain PyTorch")

    def _raised(self, args: Any, kwargs: Any) -> Any:
        """What the model raises, as it does where nobody compiles it: nothing is known of its other calls. Dynamo reads
        it from now on where it raises only in runs that are looked at."""
        result = self.model(*args, **kwargs)
        self.is_read = True
        return result

    def _played(self, call: Call, found: Found) -> list[Any]:
        """The model's result; nothing where it would be given another answer than in its record."""
        recording, state, _ = found
        drawn = random_state(value for value, *_ in state.tensors) if recording.asked else ()
        self._say_asked()
        try:
            result = self.at_length(call, found)
        except UnsteadyError as error:
            self.is_read = True
            warn(f"{error} Dynamo reads the model from now on.")
            return []
        except AnotherAnswerError as error:
            set_random_state(drawn)
            self.is_read = True
            warn(
                f"Another answer was given to what the model asks ({error.line or error}). Dynamo reads it from now on."
            )
            return []
        self.is_read = self.at_length.again.told  # as what changes at every call may be a symbol there
        return [result]

    def _say_asked(self) -> None:
        """Say once that a model asks whether values are true."""
        if not self.told and (asked := self.at_length.recorded.questions):
            self.told = True
            warn(
                f"The model asks whether values are true, at {'; '.join(asked)}. The answers are compared at every "
                f"call. {_OTHERWISE}"
            )
