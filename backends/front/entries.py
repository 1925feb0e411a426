"""A call of a model under Dynamo on tokens, and what it ends in.

Dynamo is called with *tokens*: tensors like the sequences, but a few steps long. Its guards check all but the length,
and its bytecode puts results where the model puts them. The callable that Dynamo gets from this backend receives the
tokens among its operands, puts the sequences in their place, and runs the program for their length. When it runs first,
nothing of the model has run yet, so that is when the model is observed. What else is to be done first is done outside
of the call: the attempt ends, and says in what state (``Outcome``).
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from reroll.backends.construct.stages.takeover import is_aside
from reroll.backends.dynamo.drawn import as_handed_over, draws_numbers
from reroll.backends.dynamo.entry import EXPLAINING, REFUSALS, Graph, HandedOn, unwrapped
from reroll.backends.dynamo.unguarded import Read, refuse_unguarded
from reroll.backends.front.calls.arguments import Call, token
from reroll.backends.front.calls.turns import between_turns
from reroll.backends.front.families import LENGTHS, Family, forget
from reroll.backends.front.held.keys import Hashed
from reroll.backends.front.held.names import Missing, standing_in
from reroll.backends.front.held.reach import Reach
from reroll.backends.front.observe import Candidate, Observed, departure, observe
from reroll.backends.progress import hinting
from reroll.capture.lengths.align import NeverError
from reroll.capture.lengths.instantiate import TooShortError
from reroll.capture.recorder.graph import Unrecordable
from reroll.errors import LengthError, UnsupportedError, is_shortage
from reroll.planning.options import Options

LOG = logging.getLogger(__name__)
_WORDS = 50_000  # parts of keys that are looked for again
_SKIPPED = "found no compiled frames"  # in what torch raises with fullgraph=True


class SkippedError(UnsupportedError):
    """Dynamo has not looked at the model."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The call has run; ``Running.returned`` is what Dynamo's bytecode made of it."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """The tokens do not have the length of the call's pattern, which is ``steps``. Nothing has run."""

    steps: int


@dataclass(frozen=True, slots=True)
class Untraced:
    """The traces of an entry at the other lengths of the call's pattern are missing. Nothing has run.

    They are not made at once: what Dynamo holds of a frame in which it fails to compile another call of the same frame
    is never freed (torch 2.11 to 2.13).
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class Refused:
    """Dynamo does not trace the model."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The operations of the model cannot be recorded."""

    error: Unrecordable


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sizes of the call are noted, for code that serves any. Nothing has run, and nothing was compiled."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Something that the model reads is another one than Dynamo has read, whose guards do not tell. Nothing has run."""


@dataclass(frozen=True, slots=True)
class Unproved:
    """The program of the call has to be proved first. Nothing has run."""

    graph: Graph


Outcome = Ran | Misfit | Untraced | Refused | Unrecorded | Sampled | Stale | Unproved


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Row:
    """Stands for value ``index`` of ``count`` of run ``run`` of the outputs, until the model's result is complete."""

    run: int
    index: int
    count: int


@dataclass(slots=True, eq=False)
class Running:
    """One call of a compiled model: its arguments, the tokens in their place, and what is known of its length.

    probing: whether the graph is only looked at. sampling: whether only its sizes are. unusable: lengths whose traces
    gave no template, and why; refused: those that gave no pattern. most: steps of short runs in a search for one.
    held: the key of what the model holds. looked: whether the model was looked at. proving: what runs in place of the
    program, as it is to be proved. proved: that it was, for this call. anew: whether it is
    proved, whatever was. departed: what the model does otherwise than when it was observed. failed: what the other way
    to a graph, Dynamo's or a record, has ended in at this call. returned: what came of it, a few steps long, with
    ``Row`` s. It is held here and in no frame: what was tried in vain holds its frames, and a ``Row`` that is held by
    somebody else is an error.
    """

    front: Front
    call: Call
    observed: Observed | None = None
    probing: bool = False
    sampling: bool = False
    steps: int = 0
    most: int = 0
    sequences: dict[int, Tensor] = field(default_factory=dict)
    runs: list[Sequence[Any]] = field(default_factory=list)
    lent: list[weakref.ref[Any]] = field(default_factory=list)
    unusable: dict[tuple[int, ...], LengthError] = field(default_factory=dict)
    refused: dict[Candidate, LengthError] = field(default_factory=dict)
    failed: Exception | None = None
    held: Any = None
    looked: bool = False
    proving: Callable[..., Any] | None = None
    proved: bool = False
    departed: str = ""
    anew: bool = False
    returned: Any = None
    read: Callable[[], Any] = tuple

    def attempt(self) -> Outcome:
        """Run the model on tokens of ``steps`` steps. What is no state goes through: errors, and ``Reached``."""
        try:
            self.returned = self.traced()
            return Ran()
        except Unwound as unwound:
            return unwound.state
        except Unrecordable as error:
            return Unrecorded(error)
        except REFUSALS as error:
            return Refused(error)
        except IndexError as error:  # of a table that has a row for each step of the call, or of a token
            return Refused(error)
        except RuntimeError as error:
            if _SKIPPED not in str(error):
                raise
            return Refused(SkippedError("Dynamo leaves the model as it is, without a word on why."))

    def traced(self) -> Any:
        """Call the model under Dynamo on tokens of ``steps`` steps. Where that ends in no result, nothing is drawn from
        Python's random numbers, which Dynamo's bytecode does before a graph runs."""
        tokens, self.sequences = self.call.resized(self.steps, token)
        mark, drawn = RUNNING.set(self), random.getstate()
        try:
            with (
                hinting(self.call.doubts, wanted=not self.front.entries) as self.read,
                standing_in(self.front.missing),
            ):
                return tokens.run(self.front.traced)
        except BaseException:
            random.setstate(drawn)
            raise
        finally:
            RUNNING.reset(mark)


RUNNING: ContextVar[Running | None] = ContextVar("RUNNING", default=None)


class Unwound(BaseException):
    """Raised in place of running a graph; no ``except Exception`` of a model catches it."""

    def __init__(self, state: Misfit | Untraced | Sampled | Stale | Unproved) -> None:
        super().__init__()
        self.state = state


class Probed(HandedOn):
    """Raised in place of compiling a graph that is only looked at."""

    def __init__(self, module: fx.GraphModule) -> None:
        Exception.__init__(self, "traced")
        self.module, self.first_useful_frame = module, None


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """A model, the model under Dynamo with a ``new_backend``, how it is to be compiled, what is, and what it holds.

    missing: globals that the model assigns before it reads them, which Dynamo does not read unless they are there.
    """

    model: Callable[..., Any]
    traced: Callable[..., Any]
    options: Options
    entries: weakref.WeakKeyDictionary[Handle, Entry] = field(default_factory=weakref.WeakKeyDictionary)
    reach: Reach = field(default_factory=Reach)
    missing: list[Missing] = field(default_factory=list)


def new_backend() -> Callable[..., Any]:
    """What Dynamo calls with a graph, which compiles nothing yet.

    Dynamo shares what it compiled between equal backends, so each compiled model has one of its own.
    """

    def backend(module: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        running = RUNNING.get()
        assert running is not None, "only reroll.compile calls this backend"
        running.read()
        try:
            refuse_unguarded()
            as_handed_over(module, ())
        except UnsupportedError as error:
            raise unwrapped(error) from None
        if running.probing:
            raise Probed(module)
        handle = Handle()
        running.front.entries[handle] = Entry(module)
        return handle.run

    return backend


class Handle:
    """What Dynamo holds of an entry: Dynamo keeps it when the model is gone, and drops it when that is still there."""

    def run(self, *operands: Any) -> Any:
        """Run the program of the present call on its sequences."""
        running = RUNNING.get()
        assert running is not None, "only reroll.compile calls what it compiled"
        return running.front.entries[self].run(running, operands)


@dataclass(slots=True)
class Known:
    """A key that calls have had, what was observed at the first of them, and how many there were."""

    key: Hashed
    observed: Observed
    calls: int = 1


class Entry:
    """One graph of Dynamo's: what its guards hold fixed, at every length."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.read, self.draws = module, Read.here(), draws_numbers(module)
        self.families: dict[Any, Family] = {}
        self.observed: OrderedDict[Hashed, Known] = OrderedDict()
        self.words = dict[Any, Any]()

    def run(self, running: Running, operands: Sequence[Any]) -> Any:
        """Run the program of a call on its sequences."""
        if running.probing:
            raise Probed(self.module)
        if self.read.changed:
            raise Unwound(Stale())
        if running.observed is None or not self.observed:
            running.observed = self._observe(running)
        lengths = running.observed.pattern.lengths
        if lengths[-1] != running.steps:
            raise Unwound(Misfit(lengths[-1]))
        family = self.families.get((lengths, running.call.places))
        if family is None:
            raise Unwound(Untraced(self))
        if not self.draws and not running.observed.pattern.reads_as(family.pattern):
            raise Unwound(Stale())
        if running.sampling:
            family.sample(running.observed, operands, running.sequences)
            raise Unwound(Sampled())
        graph, outputs = self._program(running, family, operands)
        graph.plans.follow()
        asked = EXPLAINING.get()
        if asked is not None:
            asked.reach(graph)
        if running.proving is None:
            _begin(running, family, graph)
        given = [running.sequences.get(id(each), each) for each in operands]
        _empty(each for each in operands if id(each) in running.sequences)
        with running.call.as_it_is(), between_turns():
            results = (running.proving or graph.run)(*given)
        return tuple(_given(results, outputs, running))

    def _program(
        self, running: Running, family: Family, operands: Sequence[Any]
    ) -> tuple[Graph, tuple[int | None, ...]]:
        """The program of a call; where a template does not tell what it is at this length, its lengths are unusable."""
        assert running.observed is not None
        try:
            return family.program(running.observed, operands, running.sequences)
        except TooShortError:
            raise
        except LengthError as error:
            running.unusable[family.pattern.lengths] = error
            running.observed = None
            raise Unwound(Misfit(running.steps)) from None

    def trace(self, running: Running) -> bool:
        """Trace the call at the other lengths of its pattern; whether they give a template. If not, why is noted.

        Raises NeverError where other lengths would give none either.
        """
        assert running.observed is not None
        lengths = running.observed.pattern.lengths
        try:
            modules = [*(_trace(running, steps) for steps in lengths[:-1]), self.module]
            self.families[lengths, running.call.places] = Family(
                running.observed.pattern, modules, running.front.options
            )
        except NeverError:
            raise
        except LengthError as error:
            running.unusable[lengths] = error
            running.observed = None
            return False
        return True

    def _observe(self, running: Running) -> Observed:
        """What is known of a call in its state: what a model reads late in a sequence, Dynamo's guards do not hold."""
        places = running.call.places
        _, held = running.front.reach.noted(running.front.model, running.call.args, running.call.kwargs)
        counted = running.call.length if running.call.counter is not None else None
        key = Hashed((places, counted, held))  # of hundreds of objects: hashed, and compared with an equal one, once
        known = self.observed.get(key)
        key = known.key if known else Hashed((places, counted, self._shared(held)))
        observed = running.observed or (known.observed if known else None)
        running.held, running.looked = held, running.looked or known is None
        if observed is None or observed.pattern.lengths in running.unusable:
            alike = [each.observed for each in self.observed.values() if each.key.value[0] == places]
            patterns = [each.pattern for each in alike if each.pattern.lengths not in running.unusable]
            known_ones = [*dict.fromkeys(patterns)]
            how = running.unusable, running.refused, running.most
            observed = observe(running.front.model, running.call, known_ones, *how)
        if known is None or known.observed is not observed:
            self.observed[key] = Known(key, observed)
        elif running.proving is None:
            known.calls += 1
            self._look_again(running, known)
        self.observed.move_to_end(key)
        forget(self.observed, LENGTHS)
        return observed

    def _look_again(self, running: Running, known: Known) -> None:
        """See at the 2nd, 4th, 8th call of a key whether the model still does what was observed."""
        seldom = known.calls & (known.calls - 1) == 0
        if not seldom or self.draws or is_aside() or running.front.options.proof == "never":
            return
        try:
            running.departed = departure(running.front.model, running.call, known.observed)
        except Exception as error:
            if not is_shortage(error):
                raise
            LOG.info("not looked at again: %s", error)  # the call itself holds less

    def _shared(self, held: Any, depth: int = 3) -> Any:
        """A key whose parts are one object with the equal ones of other keys: most differ in a few shapes."""
        if depth and type(held) is tuple:
            return tuple(self._shared(part, depth - 1) for part in held)
        if len(self.words) > _WORDS:
            self.words.clear()
        return self.words.setdefault(held, held)


def _begin(running: Running, family: Family, graph: Graph) -> None:
    """A call begins, unless its program has to be proved first: the first time, or as the model does something else
    than what was observed."""
    if running.departed and not running.proved:
        graph.proof.renew(graph.plans, graph.run, running.departed)
        raise Unwound(Unproved(graph))
    if not running.proved and (family.proves(graph) or (running.anew and graph.proof.due)):
        raise Unwound(Unproved(graph))
    family.takeover.note(graph.built)


def _empty(tokens: Iterable[Tensor]) -> None:
    """Free the memory of tokens that a program's sequences have replaced: frames of the call hold them longer."""
    for each in tokens:
        each.untyped_storage().resize_(0)


def _given(results: Sequence[Any], outputs: Sequence[int | None], running: Running) -> Iterator[Any]:
    """What Dynamo expects: as many values as at the length that it traced."""
    for piece, count in zip(results, outputs, strict=True):
        if count is None:
            yield piece
            continue
        rows = [Row(len(running.runs), index, count) for index in range(count)]
        running.lent += map(weakref.ref, rows)
        running.runs.append(piece)
        yield from rows
        del rows


def _trace(running: Running, steps: int) -> fx.GraphModule:
    """Dynamo's graph of the same call at another length."""
    try:
        Running(running.front, running.call, probing=True, steps=steps).traced()
    except Probed as probed:
        return probed.module
    raise LengthError(
        f"A trace of {steps} steps gave no graph. Use torch.compile(backend='reroll') for this model, which compiles "
        "each length by itself."
    )
