"""One compiled program for every number of steps: what ``reroll.compile`` gives to Dynamo as its backend.

Dynamo is called with *tokens*: tensors like the sequences, but a few steps long. Its guards check all but the length,
and its bytecode puts results where the model puts them. The callable that Dynamo gets from this backend receives the
tokens among its operands, puts the sequences in their place, and runs the program for their length. When it runs first,
nothing of the model has run yet, so that is when the model is observed, traced at two other lengths, and compiled.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from reroll.backends.construct.kernels import Kernels, check_policy, compile_kernels
from reroll.backends.construct.replan import Plans
from reroll.backends.construct.share import fitting_all
from reroll.backends.dynamo.around import beside_of
from reroll.backends.dynamo.entry import EXPLAINING, Graph, HandedOn, Reached, assemble
from reroll.backends.front.arguments import Call, token
from reroll.backends.front.keys import key_of
from reroll.backends.front.observe import Observed, observe
from reroll.backends.front.state import State
from reroll.backends.progress import hinting
from reroll.backends.runtime.node import Idle
from reroll.capture.capture import capture
from reroll.capture.fusion.fuse import fuse
from reroll.capture.lengths.align import align
from reroll.capture.lengths.instantiate import Instance, instantiate
from reroll.errors import LengthError
from reroll.graph.fakes import fake_of, new_fake_mode
from reroll.planning.choose import Beside
from reroll.planning.options import Options
from reroll.planning.segments import any_lengths, segment_length
from reroll.recurrence import Numbers, Recurrence

_PROGRAMS = 64


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Row:
    """Stands for value ``index`` of ``count`` of run ``run`` of the outputs, until the model's result is complete."""

    run: int
    index: int
    count: int


@dataclass(slots=True, eq=False)
class Running:
    """One call of a compiled model: its arguments, the tokens in their place, and what is known of its length."""

    front: Front
    call: Call
    observed: Observed | None = None
    probing: bool = False
    steps: int = 0
    sequences: dict[int, Tensor] = field(default_factory=dict)
    runs: list[Sequence[Any]] = field(default_factory=list)
    lent: list[weakref.ref[Any]] = field(default_factory=list)
    unusable: dict[tuple[int, ...], LengthError] = field(default_factory=dict)
    read: Callable[[], Any] = tuple

    def traced(self) -> Any:
        """Call the model under Dynamo on tokens of ``steps`` steps."""
        tokens, self.sequences = self.call.resized(lambda value, dim: token(value, dim, self.steps))
        mark = RUNNING.set(self)
        try:
            with hinting(self.call.doubts, wanted=not self.front.entries) as self.read:
                return self.front.traced(*tokens.args, **tokens.kwargs)
        finally:
            RUNNING.reset(mark)


RUNNING: ContextVar[Running | None] = ContextVar("RUNNING", default=None)


class Redirect(BaseException):
    """Raised in place of running a graph whose tokens do not have the length of the call's pattern."""


class Untraced(BaseException):
    """Raised in place of running a graph whose traces at the other lengths of the call's pattern are missing.

    They are not made at once: what Dynamo holds of a frame in which it fails to compile another call of the same frame
    is never freed (torch 2.11 to 2.13).
    """

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry


class Probed(HandedOn):
    """Raised in place of compiling a graph that is only looked at."""

    def __init__(self, module: fx.GraphModule) -> None:
        Exception.__init__(self, "traced")
        self.module, self.first_useful_frame = module, None


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """A model, the model under Dynamo with a ``new_backend``, how it is to be compiled, and what is."""

    model: Callable[..., Any]
    traced: Callable[..., Any]
    options: Options
    entries: weakref.WeakKeyDictionary[Handle, Entry] = field(default_factory=weakref.WeakKeyDictionary)


def new_backend() -> Callable[..., Any]:
    """What Dynamo calls with a graph, which compiles nothing yet.

    Dynamo shares what it compiled between equal backends, so each compiled model has one of its own.
    """

    def backend(module: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        running = RUNNING.get()
        assert running is not None, "only reroll.compile calls this backend"
        running.read()
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


class Entry:
    """One graph of Dynamo's: what its guards hold fixed, at every length."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.families: dict[Any, Family] = {}
        self.observed: OrderedDict[Any, Observed] = OrderedDict()

    def run(self, running: Running, operands: Sequence[Any]) -> Any:
        """Run the program of a call on its sequences."""
        if running.probing:
            raise Probed(self.module)
        if running.observed is None:
            running.observed = self._observe(running)
        lengths = running.observed.pattern.lengths
        if lengths[-1] != running.steps:
            raise Redirect
        family = self.families.get((lengths, running.call.places))
        if family is None:
            raise Untraced(self)
        graph, outputs = family.program(running, operands)
        graph.plans.follow()
        reached = EXPLAINING.get()
        if reached is not None:
            reached.append(graph)
            raise Reached
        results = graph.run(*(running.sequences.get(id(each), each) for each in operands))
        return tuple(_given(results, outputs, running))

    def trace(self, running: Running) -> bool:
        """Trace the call at the other lengths of its pattern; whether they give a template. If not, why is noted."""
        assert running.observed is not None
        lengths = running.observed.pattern.lengths
        try:
            self.families[lengths, running.call.places] = Family(self.module, running)
        except LengthError as error:
            running.unusable[lengths] = error
            running.observed = None
            return False
        return True

    def _observe(self, running: Running) -> Observed:
        """What is known of a call in its state: what a model reads late in a sequence, Dynamo's guards do not hold."""
        places = running.call.places
        state = State.of(running.front.model, running.call.args, running.call.kwargs, parameters=False, values=False)
        key = places, key_of(state, (running.front.model, running.call.args, running.call.kwargs))
        if key not in self.observed or self.observed[key].pattern.lengths in running.unusable:
            patterns = dict.fromkeys(each.pattern for (at, _), each in self.observed.items() if at == places)
            known = [pattern for pattern in patterns if pattern.lengths not in running.unusable]
            self.observed[key] = observe(running.front.model, running.call, known, running.unusable)
            _forget(self.observed)
        self.observed.move_to_end(key)
        return self.observed[key]


def _forget(cache: OrderedDict[Any, Any]) -> None:
    if len(cache) > _PROGRAMS:
        cache.popitem(last=False)


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


class Family:
    """The programs of one pattern, for every length, out of the same compiled segments."""

    def __init__(self, module: fx.GraphModule, running: Running) -> None:
        assert running.observed is not None
        lengths = running.observed.pattern.lengths
        self.module, self.options = module, running.front.options
        modules = [*(_trace(running, steps) for steps in lengths[:-1]), module]
        found = [fuse(capture(each, maps=True)) for each in modules]
        self.template, self.notes = align(lengths, modules, found), found[-1].notes
        check_policy(found[-1].recurrences, self.options)
        self.kernels: dict[Any, Kernels] = {}
        self.programs: OrderedDict[Observed, tuple[Graph, tuple[int | None, ...]]] = OrderedDict()

    def program(self, running: Running, operands: Sequence[Any]) -> tuple[Graph, tuple[int | None, ...]]:
        """The compiled graph at the length of a call, and what its outputs stand for."""
        observed = running.observed
        assert observed is not None
        if observed not in self.programs:
            instance = instantiate(self.template, observed.check)
            _show_sizes(instance, operands, running)
            tokens = sum(each.nbytes for each in operands if id(each) in running.sequences)
            self.programs[observed] = self._compiled(instance, tokens), instance.outputs
            _forget(self.programs)
        self.programs.move_to_end(observed)
        return self.programs[observed]

    def _compiled(self, instance: Instance, tokens: int) -> Graph:
        modules = dict[str, nn.Module]()
        kernels, running = list[Callable[[int], Kernels]](), list[Recurrence]()
        for at, recurrence in enumerate(instance.recurrences):
            if recurrence.steps == 0:
                one = replace(recurrence, steps=1)
                length = segment_length(one, self.options)
                modules[recurrence.name] = Idle(recurrence, self._kernels(at, one, length).traced.results)
                continue
            kernels.append(partial(self._kernels, at, recurrence))
            running.append(recurrence)

        def beside(results: Mapping[str, tuple[Tensor, ...]]) -> Beside:
            standing = {**modules, **{name: nn.Identity() for name in results}}
            return beside_of(assemble(self.module, instance.outer, standing), results, tokens)

        plans = Plans(fitting_all(kernels, running, self.options, beside))
        module = assemble(self.module, instance.outer, modules | plans.modules)
        return Graph(module, module, plans, "", "", self.notes, tokens)

    def _kernels(self, at: int, recurrence: Recurrence, length: int) -> Kernels:
        numbers = tuple(x.dtype for x in recurrence.xs if isinstance(x, Numbers))
        if (at, length, numbers) not in self.kernels:
            self.kernels[at, length, numbers] = compile_kernels(
                recurrence, self.options, any_lengths(length, self.options)
            )
        return self.kernels[at, length, numbers]


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


def _show_sizes(instance: Instance, operands: Sequence[Any], running: Running) -> None:
    """Give the inputs of the outer graph examples of this length."""
    mode = new_fake_mode()
    for node, operand in zip(instance.outer.find_nodes(op="placeholder"), operands, strict=True):
        value = running.sequences.get(id(operand))
        if value is not None:
            node.meta["example_value"] = fake_of(mode, value)
