"""Compiled halves by the structure of their graphs: what was compiled for some sizes serves others.

Private torch API, tried on 2.11 and 2.13: ``PyCodeCache`` (writes and loads a wrapper), ``config.save_config_portable``
(inductor's settings, on which its code depends), ``FakeTensorMode`` (of which the examples of placeholders are).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from reroll.backends.inductor.half import Code, compile_half
from reroll.backends.inductor.sizes.fit import Fit, fit
from reroll.backends.inductor.sizes.numbers import Numbered, Numbers, numbered
from reroll.backends.inductor.sizes.symbolic import PREFIX, symbolic
from reroll.backends.inductor.wrapper_codegen.chains import chained
from reroll.backends.inductor.wrapper_codegen.concrete import at_sizes
from reroll.backends.inductor.wrapper_codegen.threads import kernel_threads
from reroll.backends.inductor.wrapper_codegen.unit import quick_builds
from reroll.errors import warn

_ONE_AT_A_TIME = threading.RLock()
_MOST = 256  # families that are held, those used last
_SHARED = 8  # compiled graphs of a family whose sizes are symbols, the newest
_SAMPLES = 8  # graphs by which a family learns what its numbers depend on
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ArithmeticError)
_HELD = 64  # compiled functions of a family, those used last


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A half whose sizes are symbols; ``assumed``: what its code takes for granted of them."""

    fit: Fit
    assumed: Callable[[Sequence[int]], bool]
    code: Code

    def serves(self, numbers: Numbers) -> bool:
        """Whether a graph with these numbers is the shared one at its sizes."""
        return self.fit.holds(numbers) and self.assumed(self.fit.sizes(numbers))

    def at(self, numbers: Numbers) -> Code:
        """The code at the sizes of a graph with these numbers. Raises ValueError where its text is not understood."""
        from torch._inductor.codecache import PyCodeCache

        sizes = {f"{PREFIX}{at}": size for at, size in enumerate(self.fit.sizes(numbers))}
        source = at_sizes(self.code.source, sizes)
        if source is None:
            raise ValueError("the code that inductor writes is of another form")
        source = chained(source, shared=True)
        with quick_builds():
            return Code(PyCodeCache.load(source).call, source, self.code.itemsizes)


@dataclass(slots=True)
class Family:
    """What is compiled of graphs of one structure: ``made`` for all numbers of a graph, ``shared`` by many sizes.
    ``fixed``: sizes cannot be symbols. ``samples``: numbers of some graphs."""

    samples: list[Numbers] = field(default_factory=list)
    made: OrderedDict[Numbers, Code] = field(default_factory=OrderedDict)
    shared: list[Shared] = field(default_factory=list)
    fixed: bool = False

    def find(self, numbers: Numbers) -> Code | None:
        """What is there for a graph with these numbers."""
        if numbers not in self.made:
            shared = next((each for each in self.shared if each.serves(numbers)), None)
            if shared is None:
                return None
            self.put(numbers, shared.at(numbers))
        self.made.move_to_end(numbers)
        return self.made[numbers]

    def put(self, numbers: Numbers, code: Code) -> None:
        """Hold what was compiled for these numbers."""
        self.made[numbers] = code
        if len(self.made) > _HELD:
            self.made.popitem(last=False)
        self.note(numbers)

    def note(self, numbers: Numbers) -> None:
        """Learn from a graph with these numbers."""
        self.samples = [*self.samples[-(_SAMPLES - 1) :], numbers]


FAMILIES: OrderedDict[Hashable, Family] = OrderedDict()
Look = Callable[[fx.GraphModule, Numbered | None, bool], None]
_LOOK: ContextVar[Look | None] = ContextVar("_LOOK", default=None)


@contextmanager
def _looking(look: Look) -> Iterator[None]:
    """Inside, halves are looked at, and nothing is compiled: code cannot be called."""
    mark = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(mark)


def is_looking() -> bool:
    """Whether halves are only looked at."""
    return _LOOK.get() is not None


def sampling() -> AbstractContextManager[None]:
    """Inside, the numbers of graphs are noted, and nothing is compiled."""

    def note(_: fx.GraphModule, found: Numbered | None, backward: bool) -> None:
        if found is not None:
            _family((found.structure, backward, code_settings())).note(found.numbers)

    return _looking(note)


@contextmanager
def collecting() -> Iterator[list[tuple[fx.GraphModule, bool]]]:
    """Inside, halves that no code is there for are collected, and nothing is compiled. Gives their graphs, and whether
    each is of a backward."""
    halves: list[tuple[fx.GraphModule, bool]] = []

    def collect(graph: fx.GraphModule, found: Numbered | None, backward: bool) -> None:
        family = None if found is None else FAMILIES.get((found.structure, backward, code_settings()))
        if found is None or family is None or found.numbers not in family.made:
            halves.append((graph, backward))

    with _looking(collect):
        yield halves


def compiled(graph: fx.GraphModule, mode: FakeTensorMode, *, backward: bool) -> Code:
    """A compiled half: one that was compiled before, one whose sizes are symbols, or one for these sizes alone."""
    with _ONE_AT_A_TIME:
        found = numbered(graph.graph) if _on_cpu(graph) else None
        look = _LOOK.get()
        if look is not None:
            look(graph, found, backward)
            return Code(_uncallable, "", {})
        if found is None:
            return compile_half(graph, mode, backward=backward)
        family = _family((found.structure, backward, code_settings()))
        there = family.find(found.numbers) or _share(family, graph, found, backward=backward)
        if there is None:
            there = compile_half(graph, mode, backward=backward)
            family.put(found.numbers, there)
        return there


def _uncallable(_: list[Any]) -> Any:
    raise AssertionError("this code was only looked at")


def forget() -> None:
    """Hold nothing of what was compiled."""
    FAMILIES.clear()


def _on_cpu(graph: fx.GraphModule) -> bool:
    values = (node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
    return all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)


def code_settings() -> Hashable:
    """What inductor's code depends on beside the graph."""
    import torch._inductor.config

    config: Any = torch._inductor.config
    told = sorted((name, repr(value)) for name, value in config.save_config_portable().items())
    return tuple(told), kernel_threads(), torch.are_deterministic_algorithms_enabled()


def _family(key: Hashable) -> Family:
    family = FAMILIES.setdefault(key, Family())
    FAMILIES.move_to_end(key)
    if len(FAMILIES) > _MOST:
        FAMILIES.popitem(last=False)
    return family


def _share(family: Family, graph: fx.GraphModule, found: Numbered, *, backward: bool) -> Code | None:
    """Compile a graph with symbols for the sizes that changed since the last one; None where that cannot be."""
    if family.fixed or not family.samples:
        return None
    try:
        fitted = _fitted(family, found)
    except ValueError as error:
        _tell(error)
        return None
    if fitted is None:
        return None
    try:
        with _in_silence():
            written = symbolic(graph.graph, fitted, found.numbers)
            code = compile_half(written.graph, written.mode, backward=backward, build=False)
            shared = Shared(fitted, written.assumed(), code)
            made = shared.at(found.numbers) if shared.serves(found.numbers) else None
    except _FAILURES as error:  # the same graph is compiled without symbols next
        family.fixed = True
        _tell(error)
        return None
    if made is not None:
        family.shared = [*family.shared[-(_SHARED - 1) :], shared]
        family.put(found.numbers, made)
    return made


def _fitted(family: Family, found: Numbered) -> Fit | None:
    """The numbers of a graph as functions of sizes: by all samples, else by one that differs from it in sizes alone.

    Graphs of one structure may be of models that differ in other numbers, which follow no size. None where no size
    changes. Raises ValueError where one does, and other numbers follow none.
    """
    refusal = None
    before = [each for each in family.samples if each != found.numbers]
    for samples in (before, *([each] for each in reversed(before))):
        try:
            fitted = fit([*samples, found.numbers], found.sizes)
        except ValueError as error:
            refusal = refusal or error
            continue
        if fitted is not None and fitted.holds(found.numbers):
            return fitted
    if refusal and len(before) > 1:
        raise refusal
    return None


@contextmanager
def _in_silence() -> Iterator[None]:
    """Inside, torch does not log what it cannot do with symbols: a warning says it."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_TOLD = itertools.count()


def _tell(error: Exception) -> None:
    """Say once that sizes are compiled one by one."""
    if next(_TOLD) == 0:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        warn(
            f"A loop was called with other sizes, such as another batch size. Its segments are compiled once for each "
            f"of them, as torch cannot compile these for all at once ({reason}). Pad short batches, or drop the last "
            "one.",
        )
