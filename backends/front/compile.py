"""``reroll.compile``: a model compiled once for every number of steps.

A call attempts to run the model on tokens. What an attempt ends in says what follows (``Caller._followed``):

    attempt ─► Ran         ``outputs`` makes the result of the sequences of that of the tokens ─► done
            ─► Misfit      take tokens of the length of the call's pattern ─► attempt
            ─► Untraced    trace its other lengths; where they give no template, drop the pattern ─► attempt
            ─► Refused     take tokens of that length; where they were, the other way ─► attempt
            ─► Stale       look at the model anew ─► attempt
            ─► Unproved    prove the program beside the model ─► attempt
            ─► Sampled     nothing: it was only to show another size (``dynamic=True``) ─► done
            ─► Unrecorded  the other way ─► attempt

There are two ways from a model to its graphs. Its operations are recorded while Python runs it; where that cannot be,
Dynamo reads it. The model is observed within an attempt, when a graph of it would run, or else when Dynamo refuses it.
A call has two more ends, through all of this: after ``TooShortError`` the model runs as it is; with ``Reached`` it
names its graph to ``reroll.explain``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from reroll.backends.dynamo.entry import UNREADABLE, Graph, hooks_inside, uncut
from reroll.backends.front.beside import ANEW, prove_beside, say_departed
from reroll.backends.front.calls.arguments import Call, Time, TimeDim, find_time
from reroll.backends.front.calls.counter import told
from reroll.backends.front.calls.plainly import InTurn
from reroll.backends.front.calls.turns import turn
from reroll.backends.front.entries import (
    Entry,
    Front,
    Misfit,
    Outcome,
    Probed,
    Ran,
    Refused,
    Running,
    Sampled,
    SkippedError,
    Stale,
    Unproved,
    Unrecorded,
    Untraced,
    new_backend,
)
from reroll.backends.front.full.at_length import ONE_SIZE, AtLength, only_here
from reroll.backends.front.full.unnamed import Unnamed
from reroll.backends.front.held.again import Again
from reroll.backends.front.held.names import missing_globals
from reroll.backends.front.held.state import State
from reroll.backends.front.modules import CompiledModule, ShardedModule, refuse_no_scalar, with_loss
from reroll.backends.front.observe import (
    FEWEST,
    SHORT,
    DrawnError,
    Observed,
    OtherTimeError,
    departure,
    looked_at,
    observe,
    other_size,
    refuse_sparse,
    refuse_unrolled,
    why_it_differs,
)
from reroll.backends.front.outputs import outputs
from reroll.backends.front.recorded import Recorded, in_short, token_of_values
from reroll.backends.processes.apart import alone, forward_of, spoken_around
from reroll.backends.processes.sharded import sharded_inside
from reroll.capture.lengths.align import NeverError, TransformError
from reroll.capture.lengths.instantiate import TooShortError
from reroll.capture.lengths.template import ADVICE
from reroll.capture.recorder.graph import Unrecordable
from reroll.errors import LengthError, OptionError, ProofError, UnsupportedError, warn
from reroll.planning.options import Options, OptionsDict

M = TypeVar("M", bound=Callable[..., Any])  # a module, a function or a method
R = TypeVar("R")
Loss = Callable[[Any, Any], Any]  # of what the model gives, and of a target
_Make = Callable[[Callable[..., Any]], Any]  # of a model: what calls it
LOG = logging.getLogger(__name__)
_UNNEEDED = (
    "reroll.compile: time_dim and steps have no effect any more, and will go. Loops are found in what the model does at "
    "each call. Leave them out."
)
_ON_VALUES = "Could not guard on data-dependent expression"
"""In what Dynamo says where it depends on a value."""
_NO_NAME = "failed to find name"  # what torch says of a global that is not there
_FEW = 16  # steps of a sequence that runs as it is where nothing repeats in it
_LEAST = 40  # as three times so many steps are the first few attempts at a pattern
_SEARCHED = 3  # steps of short runs for each that is recorded at its full length
_USUAL, _ATTEMPTS = 50, 100  # more than a call with many patterns takes, and more by far


class WithLoss(Protocol):
    """What a model with a loss behind it is compiled to: the model's arguments and a target give one number."""

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """The loss."""


@overload
def compile(  # noqa: A001  # type: ignore[overload-overlap]
    model: functools.partial[R],
    *,
    time_dim: TimeDim | None = None,
    steps: str | None = None,
    loss: None = None,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> Callable[..., R]: ...


@overload
def compile(  # noqa: A001
    model: M,
    *,
    time_dim: TimeDim | None = None,
    steps: str | None = None,
    loss: None = None,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> M: ...


@overload
def compile(  # noqa: A001
    model: Callable[..., Any],
    *,
    time_dim: TimeDim | None = None,
    steps: str | None = None,
    loss: Loss,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> WithLoss: ...


@overload
def compile(  # noqa: A001
    *,
    time_dim: TimeDim | None = None,
    steps: str | None = None,
    loss: None = None,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> Callable[[M], M]: ...


@overload
def compile(  # noqa: A001
    *,
    time_dim: TimeDim | None = None,
    steps: str | None = None,
    loss: Loss,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> Callable[[Callable[..., Any]], WithLoss]: ...


def compile(  # noqa: A001  # as torch.compile
    model: Any = None,
    *,
    time_dim: TimeDim | None = None,
    steps: str | None = None,
    loss: Loss | None = None,
    dynamic: bool = False,
    **options: Any,
) -> Any:
    """Compile a model whose compile cost does not grow with the number of steps T; also a decorator.

    model: a module, function or method with a loop over time, or with blocks over depth, in it. A module gives a module
    with the same parameters, a function a function.
    time_dim: the dimension of time of every tensor argument that has it (the first tensor with such a dimension says
    what T is; others of that size there have it too), or a mapping from names of parameters to dimensions:
    ``{"x": 1, "h": None}``; for nested arguments ``{"batch": {"frames": 0, "labels": None}}``.
    steps: the number of steps of a loop over ``range(num_steps)``, by the name or path that the model has for it, such
    as ``"num_steps"`` or ``"config.num_steps"``: a parameter, an attribute of the model, or a variable of an enclosing
    function or of the module that its function is from. It may stand beside ``time_dim``, and alone where the input is
    the same at every step. It is set to few steps while the model is looked at, and put back.
    loss: a function of what the model gives and of a target, such as ``torch.nn.functional.mse_loss``, which returns
    one number. What comes back is a function then, ``compiled(*arguments, target=...)``, of that number. Where the loss
    is a sum or mean over time, each step adds its part, so neither what the model gives nor its gradient is held for
    all steps, and a budget covers the loss. The same goes for a loss within a model or function of yours.
    dynamic: whether other sizes, such as other batch sizes, will come: the model is looked at once more, at about half
    of the first batch, so that the first segments are compiled for any size. Without it the second size is compiled so.
    On a GPU each size is compiled by itself.
    options: those of ``reroll.Options``.

    Nobody needs to name time. The first call of each shape then records what the model does in it, while Python runs
    it, and rolls the loops over time in that record, or else equal blocks over depth. Steps that repeat are followed
    and not written down; of others 100,000 operations at most. Where it cannot tell what the model does, this is
    ``torch.compile(model, backend="reroll", options=options)``, and so it is among several processes.

    With ``time_dim`` or ``steps`` a new length is not recorded. The first call runs the model without gradients on a
    few short pieces of its sequence, records its operations at three short lengths, and compiles one segment. The first
    call at every further length runs the model once without gradients, operation by operation, to check that it does
    there what the short records say; nothing is recorded or compiled again.

    After a call that looks at the model it is as if it had not been run: attributes, buffers and random numbers are put
    back. What hooks print happens in those runs too. A model that takes from an iterator which its code names, or that
    reads or writes files, is refused there; where nobody names time Dynamo reads it. At every call the arguments (but
    for T where it is named), what can be reached from the model, what its code names, and torch's modes are compared,
    and the model is recorded anew where they differ, such as for another batch size, dtype or mode of training. The
    clock and what no Python object shows must stay the same; a proof that finds that they do not says so. A sequence so
    short that its first and last steps, which differ from the others, meet (most often below three) is run by torch as
    it is. Calls in several threads wait for one another while a model is looked at or compiled, not while it runs.

    Where a record cannot tell what the model does (it prints, counts in an attribute, or reads the values of tensors),
    Dynamo reads the Python code of the model instead, as under ``torch.compile(fullgraph=True, dynamic=False)``, and
    what it refuses is refused with its error. Values may be asked whether they are true: the answers are compared at
    every call, a RerollWarning says so, and another answer is an error.

    What short records do not tell, such as a branch at step T // 2, is recorded at the full length, for each such
    length anew; at the second one a RerollWarning says so. Raises LengthError, with the line, where that has no loop
    either.
    """
    Options.of(options)
    if time_dim is not None or steps is not None:
        warnings.warn(_UNNEEDED, DeprecationWarning, stacklevel=2)
    how = {"dynamic": dynamic, **options}
    if model is None:
        return lambda target: compile(target, loss=loss, **how)
    if loss is not None:
        return _with_loss(model, loss, how)
    _refuse_what_is_no_model(model)
    if not alone():
        _refuse_dynamic(dynamic)
        return _together(model, options)
    make: _Make = partial(Unnamed, options=options, dynamic=dynamic)
    if isinstance(model, nn.Module):
        return AnyLengthModule(model, make)
    caller = make(model)

    @functools.wraps(model)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return caller(*args, **kwargs)

    compiled.reroll_caller = caller  # type: ignore[attr-defined]
    return compiled


def _check_time(time_dim: Any, steps: Any, options: Mapping[str, Any]) -> None:
    """Raise OptionError for where time cannot be."""
    if "depth" in options:
        raise OptionError(
            "reroll.compile with time_dim or steps rolls loops over time, and depth is no option of it. Blocks over "
            "depth are rolled without them."
        )
    if not isinstance(time_dim, int | Mapping | None) or isinstance(time_dim, bool):
        raise OptionError(
            f"reroll.compile: time_dim={time_dim!r} must be a dimension, or a mapping of dimensions by name."
        )
    if steps is not None and not isinstance(steps, str):
        raise OptionError(
            f"reroll.compile: steps={steps!r} must be the name of the model's number of steps, such as 'num_steps', "
            "not the number."
        )


def _refuse_what_is_no_model(model: Any) -> None:
    """Raise OptionError for a class, which torch.compile would change, and with it every instance there is; and for
    what is compiled already."""
    if not callable(model):
        raise OptionError(f"reroll.compile was given {type(model).__name__}, which cannot be called.")
    if hasattr(model, "reroll_caller"):
        raise OptionError(
            "reroll.compile was given a model that it has compiled already. Give the plain model to it, once, with all "
            "options. It is compiled._orig_mod of a module, and compiled.__wrapped__ of a function."
        )
    if isinstance(model, type):
        raise OptionError(
            f"reroll.compile was given the class {model.__name__}, which is no model yet. Compile an instance, "
            f"reroll.compile({model.__name__}(...), time_dim=...), or put the decorator on its forward."
        )


def _refuse_dynamic(dynamic: Any) -> None:
    if dynamic:
        raise OptionError(
            f"reroll.compile: dynamic={dynamic!r} is not for models that several processes train together, whose time "
            "nobody has named. Leave it out: each size is compiled when it comes."
        )


def _with_loss(model: Any, loss: Any, how: Mapping[str, Any]) -> Any:
    """A model with a loss behind it, as a function of both."""
    for each, name in ((model, "model"), (loss, "loss")):
        if not callable(each):
            raise OptionError(f"reroll.compile was given {type(each).__name__} as {name}, which cannot be called.")
    compiled = compile(with_loss(model, loss), **how)

    @functools.wraps(compiled)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if "target" not in kwargs:
            raise OptionError(
                "reroll.compile with loss= takes the target by name, behind the model's arguments: "
                "compiled(x, target=...)."
            )
        value = compiled(*args, **kwargs)
        refuse_no_scalar(value)
        return value

    return checked


def _together(model: Any, options: Mapping[str, Any]) -> Any:
    """A model that several processes train together, by the backend; Dynamo's own decorators and errors."""
    if sharded_inside(model):
        return ShardedModule(model, options)
    return uncut(torch.compile(model, backend="reroll", options=dict(options)))


class Caller(InTurn):
    """Calls a model on sequences of any length."""

    def __init__(self, model: Callable[..., Any], time: Time, options: Options, *, dynamic: bool) -> None:
        self.model, self.time, self.options, self.dynamic = model, time, options, dynamic
        self.front, self.read, self.told = self._recorded(), self._read(), set[str]()
        self.signature = _signature(model)
        self.steps = SHORT[0][-1]
        self.looked = self.sampled = False
        self.again = Again()
        self.short = dict[tuple[int, int], str]()  # why lengths are too short, with ``steps`` when that was seen
        self.said = False  # that such a length is run by torch
        self.at_length, self.alone = AtLength(model, options), set[int]()  # lengths that are recorded alone

    def _recorded(self) -> Front:
        return Front(self.model, Recorded(self.model), self.options)

    def _read(self) -> Front:
        # By keyword: Lightning's torch.compile leaves on a module what it is given beside it, and this backend is no
        # part of the user's model, which may be pickled.
        with hooks_inside():
            traced = torch.compile(model=self.model, backend=new_backend(), fullgraph=True, dynamic=False)
        return Front(self.model, traced, self.options)

    def _anew(self, front: Front) -> Front:
        """The same way to a graph, of which nothing is known yet."""
        if _is_recorded(front):
            return self._recorded()
        self.read = self._read()
        return self.read

    def _begun(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        plainly = partial(self.model, *args, **kwargs)
        call = find_time(self.model, self.signature, self.time, args, kwargs)
        if call.length in self.alone and (found := self.at_length.found(call)):
            return partial(_itself, self.at_length(call, found))
        self.alone.discard(call.length)  # where it cannot be recorded any more, which is not tried at each call
        steps = max(call.length, _LEAST) + sum(self.alone)  # that are recorded anew without a pattern
        running = Running(self.front, call, steps=self.steps, most=_SEARCHED * steps)
        if not self.looked and call.length:
            self._look(call)
        if self.dynamic and not self.sampled and call.length:
            self._sample(call)
        short = call.length == 0 or (call.length, self.steps) in self.short
        try:
            short = short or not self._settled(running)
        except LengthError as error:
            if found := self.at_length.found(call):
                self._say_alone(call, error)
                return partial(_itself, self.at_length(call, found))
            few = self.at_length.nothing and call.length < _FEW
            if not isinstance(error, TooShortError) and not few:
                raise self._with_numbers(self._with_questions(running, error)) from error.__cause__
            self.short[call.length, self.steps], short = str(error), True
        return self._plainly(call, plainly) if short else self._done(running)

    def _plainly(self, call: Call, plainly: Callable[[], Any]) -> Callable[[], Any]:
        self._say_short(call)
        return plainly

    def _done(self, running: Running) -> Callable[[], Any]:
        """What is left to do of a call that has run."""
        self._take(running.front)
        if running.observed is None:
            refuse_sparse(self.model, running.call)
            raise LengthError(
                "The model has no operation that Dynamo sees, so there is nothing to compile. Use it as it is."
            )
        self.again.note(running.call.length, running.held, looked=running.looked)
        return partial(_result, running)

    def _say_short(self, call: Call) -> None:
        """Warn, once, that a sequence of more than a few steps is run by torch. Raises LengthError where gradients
        would have to be cut, or a budget kept."""
        every = self.options.truncate
        if every is not None and call.length > every:
            raise LengthError(
                f"truncate={every}: a sequence of {call.length} steps is too short for reroll, as its first and last "
                "steps differ from the others, so its gradients cannot be cut. Pass a longer one."
            )
        if call.length < FEWEST:
            return
        text = (
            f"reroll.compile finds no loop in a sequence of {call.length} steps: {self.short[call.length, self.steps]}"
        )
        if self.options.memory_budget is not None:
            raise LengthError(f"{text} It would run as plain PyTorch, which keeps no memory_budget. Leave that out.")
        if not self.said:
            self.said = True
            warn(f"{text} Such sequences run as plain PyTorch, which saves no memory.")

    def _look(self, call: Call) -> None:
        """See that what time_dim names is time, once."""
        try:
            refuse_unrolled(self.model, call)
        except LengthError as error:
            raise self._with_numbers(error) from None
        self.looked = True

    def _sample(self, call: Call) -> None:
        """Look at the model at another size, so that what is compiled first serves any."""
        self.sampled = True
        if self.options.lowering == "eager":
            return  # which serves any size
        reason = only_here(call)
        if not reason:
            other, reason = other_size(self.model, call), ONE_SIZE
            with suppress(Exception):  # of a size that it is not made for later in the sequence
                if other is not None:
                    self._settle(Running(self.front, other, steps=self.steps, sampling=True))
                    return
        warn(f"dynamic=True: {reason}")

    def _settled(self, running: Running) -> bool:
        """Run the call; whether its sequence is long enough. One that is not is remembered, and looked at no more."""
        try:
            self._settle(running)
        except TooShortError as error:
            if running.call.length >= FEWEST:
                raise
            self.short[running.call.length, self.steps] = str(error)
            return False
        return True

    def _say_alone(self, call: Call, error: LengthError) -> None:
        """Note that no short runs tell of a call, from which on its length is recorded; warn at the second length."""
        why = str(self._with_numbers(error)).replace(ADVICE, "").strip()
        lengths = [*self.alone, call.length]
        self.alone.add(call.length)
        text = (
            f"What the model does at {' and '.join(map(str, lengths))} steps does not follow from what it does at a "
            f"few: {why} So it was recorded at its full length, which is done anew for each such length, and takes "
            "longer the longer it is."
        )
        if len(lengths) == 2:
            warn(text)
        LOG.info(text)

    def _with_numbers(self, error: LengthError) -> LengthError:
        """A refusal, with the numbers that ``steps`` could have named where it names none."""
        numbers = "" if self.time.steps else told(self.model)
        return LengthError(f"{error} If the loop is not over that:{numbers}") if numbers else error

    def _with_questions(self, running: Running, error: LengthError) -> LengthError:
        """Why no template fits what was recorded: where the model asks whether values are true, which may end a loop;
        and, in place of the way out that the error names, why Dynamo does not read the model."""
        text, asked = str(error), _asked(running.front)
        refusal = self._refusal(running) if _is_recorded(running.front) and ADVICE in text else None
        if refusal is not None:
            instead = (
                f"Dynamo does not read the model either ({in_short(str(refusal))}). If that is an index made of a "
                "tensor, read all rows before the loop (table[times], or torch.index_select), and iterate over them."
            )
            text = text.replace(ADVICE, instead)
        if asked:
            text = (
                f"{text} The model asks whether values are true, at {'; '.join(asked)}. If an answer ends the loop "
                "(break), its steps are as many as values say, which cannot be rolled: run all steps, and keep what is "
                "done by torch.where."
            )
        return error if text == str(error) else LengthError(text)

    def _refusal(self, running: Running) -> Exception | None:
        """Why Dynamo does not read the model, if it does not."""
        if running.failed is not None:
            return running.failed
        try:
            Running(self.read, running.call, probing=True, steps=running.steps).traced()
        except Probed:
            return None
        except Exception as error:  # noqa: BLE001  # of the model's, too: it is told beside another one
            return error
        return None

    def _take(self, front: Front) -> None:
        """Call the model this way from now on."""
        self.front = front
        text = _questions(front)
        if text and text not in self.told:
            self.told.add(text)
            warn(text)

    def _settle(self, running: Running) -> None:
        """Run the call, with the first pattern of it whose traces give a template."""
        for attempt in range(_ATTEMPTS):
            if attempt == _USUAL:  # something that what ran reads changes at every run, such as a library's counter
                running.front.reach.ran.give_up()
            if self._followed(running, running.attempt()):
                return
        raise LengthError(
            "The model is another one after every run that looks at it: it changes something that it reads, and that "
            "is not put back (a global, a file, an attribute of a class). Keep that outside of the forward pass."
        )

    def _followed(self, running: Running, outcome: Outcome) -> bool:
        """Do what an attempt asks for; whether it ran. If not, another one comes next."""
        match outcome:
            case Ran() | Sampled():
                self.steps = running.steps  # the next call is most often alike
                return True
            case Misfit(steps):
                LOG.debug("%d steps have the pattern of %d", running.call.length, steps)
                running.steps = steps
            case Unproved(graph):
                LOG.debug("the program is proved")
                self._prove(running, graph)
            case Stale():
                LOG.debug("what the model reads has changed, though nothing says so: it is looked at anew")
                running.front = self._anew(running.front)
                running.observed = None
            case Untraced(entry):
                LOG.debug("tracing the model at other lengths of the pattern of %d steps", running.steps)
                self._trace(running, entry)
            case Refused(error):
                LOG.debug("Dynamo does not trace the model: %s", error)
                self._refused(running, outcome)
            case Unrecorded(error):
                LOG.debug("the model's operations cannot be recorded: %s", error)
                self._other(running, error)
        return False

    def _prove(self, running: Running, graph: Graph) -> None:
        """Prove the program of a call, before it runs. Raises ProofError."""
        running.proved = True
        observed = running.observed
        assert observed is not None

        def replay(call: Call, run: Callable[..., Any]) -> Any:
            alike = Running(running.front, call, observed=observed, steps=running.steps, proving=run)
            outcome = alike.attempt()
            if not isinstance(outcome, Ran):
                raise UnsupportedError(ANEW)
            return _result(alike)

        def another() -> str:
            return "" if running.departed else departure(self.model, running.call, observed)

        writes = observed.pattern.changes_inputs
        try:
            prove_beside(self.model, running.call, graph.proof, replay, another, writes=writes)
        except ProofError:
            if running.departed:  # what is known of the model is of what it was: a later call looks at it anew
                self.front = self._anew(running.front)
            raise
        say_departed(running.departed, graph.proof)
        if steps := graph.proof.fewer(running.call.length):
            self._prove_fewer(running, graph, steps)

    def _prove_fewer(self, running: Running, graph: Graph, steps: int) -> None:
        """Prove gradients at the first steps of a call, where there is no room for what torch saves of all of them. It
        is the same model, by the same segments. Raises ProofError."""
        call, _ = running.call.resized(steps, token_of_values)
        fewer = Running(running.front, call, steps=running.steps, anew=True)
        with suppress(LengthError), looked_at(self.model, call, frozenset(), parameters=False):
            for _ in range(_ATTEMPTS):
                outcome = fewer.attempt()
                if isinstance(outcome, Unproved):
                    self._prove(fewer, outcome.graph)
                    graph.proof.note_fewer(steps, outcome.graph.proof)
                if isinstance(outcome, Unproved | Ran) or self._followed(fewer, outcome):
                    return

    def _trace(self, running: Running, entry: Entry) -> None:
        """Trace the other lengths of the call's pattern."""
        try:
            running.steps = running.steps if entry.trace(running) else self.steps
        except Unrecordable as error:
            self._other(running, error)
        except TransformError as error:
            if _is_recorded(running.front) or running.failed:
                raise LengthError(str(error)) from None
            self._other(running, LengthError(str(error)))
        except NeverError as error:
            raise LengthError(str(error)) from None

    def _other(self, running: Running, error: Exception) -> None:
        """Go the other way to a graph than the one that has ended in an error. Raises Dynamo's refusal, with why the
        model's operations cannot be recorded, where both end in one."""
        recorded = _is_recorded(running.front)
        if running.failed is not None:
            raise (_noted(running.failed, error) if recorded else _noted(error, running.failed)) from None
        LOG.info("%s: %s", "not recorded" if recorded else "not read by Dynamo", error)
        running.failed, running.front = error, self.read if recorded else self._recorded()

    def _refused(self, running: Running, refused: Refused) -> None:
        """Try the length of the call's pattern, then the other way. Raises the refusal behind both."""
        error = refused.error
        if self._finds_missing(running, error):
            return
        if running.observed is None:
            running.observed = self._observed(running, error)
            steps = running.observed.pattern.lengths[-1]
            if steps != running.steps:
                running.steps = self.steps = steps
                return
        if not isinstance(error, (*UNREADABLE, SkippedError)):
            raise error
        self._other(running, error)

    def _finds_missing(self, running: Running, error: Exception) -> bool:
        """Whether Dynamo failed at a global that the model assigns first, and which something stands for from now."""
        missing = running.front.missing
        if missing or _NO_NAME not in str(error):
            return False
        missing += missing_globals(State.of(self.model, parameters=False, values=False).code)
        return bool(missing)

    def _observed(self, running: Running, refusal: Exception) -> Observed:
        try:
            return observe(self.model, running.call, (), {}, running.refused, running.most)
        except DrawnError as error:
            raise _noted(refusal, error) from None
        except LengthError as error:
            short = isinstance(error, TooShortError) and running.call.length < FEWEST
            if short or isinstance(error, OtherTimeError) or not isinstance(refusal, (*UNREADABLE, SkippedError)):
                error.__context__ = refusal  # it led here
                raise
            raise _noted(refusal, error, why_it_differs(self.model, running.call)) from None


def _noted(refusal: Exception, reason: Exception, cause: str = "") -> Exception:
    """Dynamo's refusal, with why nothing else can be done; in other words where it says nothing of the model."""
    if _ON_VALUES in str(refusal):
        expression = str(refusal).partition(_ON_VALUES)[2].partition(" (")[0].strip()
        return UnsupportedError(
            f"reroll.compile: the model reads the value of a tensor as a number of Python's, and torch has to know it "
            f"({expression}). {reason}{cause} Compute with the tensor itself (BatchNorm: give it a momentum). Or name "
            "no time: reroll.compile(model) reads around that line, and runs a loop with it as plain PyTorch."
        )
    refusal.add_note(f"reroll.compile cannot record the model's operations either: {reason}{cause}")
    return refusal


def _itself(result: Any) -> Any:
    return result


def _is_recorded(front: Front) -> bool:
    return isinstance(front.traced, Recorded)


def _asked(front: Front) -> list[str]:
    """The lines of a recorded model that ask whether a value is true, but for those of packed sequences."""
    return front.traced.questions if isinstance(front.traced, Recorded) else []


def _questions(front: Front) -> str:
    """What is said of a recorded model that packs sequences, or asks whether values are true; empty of others."""
    packed, asked = isinstance(front.traced, Recorded) and front.traced.asked, _asked(front)
    parts = []
    if packed and len(asked) < len(packed):
        parts.append(
            "The longest sequence that is packed must be as long as the input: a batch in which it ends before is an "
            "error, so cut the input of each to it first (x[:lengths.max()])."
        )
    if asked:
        parts.append(
            f"The model asks whether values are true, at {'; '.join(asked)}. The answers are compared at every call, "
            "and another answer is an error."
        )
    return " ".join(parts)


def _signature(model: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return None


class AnyLengthModule(CompiledModule):
    """A module compiled for every number of steps. Attributes are those of the module that it was made from."""

    def __init__(self, module: nn.Module, make: _Make) -> None:
        super().__init__(module)
        self._set_caller(make)

    def _set_caller(self, make: _Make) -> None:
        inside = spoken_around(self._orig_mod)
        model = self._orig_mod if inside is None else inside.forward
        object.__setattr__(self, "_inside", inside)
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "reroll_caller", make(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result. Raises UnsupportedError if it was sharded since it was compiled."""
        if not alone() and spoken_around(self._orig_mod) is not self._inside:
            raise UnsupportedError(
                f"{type(self._orig_mod).__name__} was sharded after it was given to reroll.compile, which compiled "
                "what it was before. Use fully_shard first, and reroll.compile then."
            )
        if self._inside is None:
            return self.reroll_caller(*args, **kwargs)
        with turn(), forward_of(self._inside, self.reroll_caller):
            return self._orig_mod(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["reroll_caller"], state["_inside"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_caller(state["_make"])


def _result(running: Running) -> Any:
    """What a run has returned, as the model would. Raises LengthError where the model keeps a part of it."""
    result = outputs(running.returned, running)
    running.returned = None
    if any(lent() is not None for lent in running.lent):
        raise LengthError(
            "The model keeps the value of a single step in an attribute, a global or another object, where only "
            "what a short trace had can be put. Return it instead, and set anew what was changed."
        )
    return result
