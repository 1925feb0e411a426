"""Passes by name: those of reroll.passes, those registered by users, those of the entry-point group "reroll.passes"."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar, get_args

from torch import Tensor, fx, nn

from reroll.capture.rows.hoist import copy_with_examples
from reroll.errors import IllegalProgramError, PassError
from reroll.program.context import Context
from reroll.program.program import Program
from reroll.program.tried import PASS, blamed_on, try_half, try_loops, try_step
from reroll.program.verifier import check
from reroll.recurrence import Capture
from reroll.words.registry import Registry

On = Literal["loops", "step", "half", "program"]
T = TypeVar("T")


class Pass(Protocol):
    """From a legal training program to a legal training program with the same results."""

    def __call__(self, program: Program, context: Context, /) -> Program:
        """A new program; the given one is left as it is."""


class LoopPass(Protocol):
    """From the loops of a graph, with the graph around them, to loops and a graph with the same results."""

    def __call__(self, loops: Capture, /) -> Capture:
        """Rewritten loops; the given ones are left as they are. New tensors have examples in meta["example_value"]."""


class HalfPass(Protocol):
    """From the forward or the backward of a segment to a graph with the same operands and results, but for rounding."""

    def __call__(self, half: fx.GraphModule, context: Context, /) -> fx.GraphModule:
        """The rewritten half, which may be the given one, edited; nodes have their values' examples in meta["val"]."""


class StepPass(Protocol):
    """From the graph of one step to a graph of one step with the same results."""

    def __call__(self, step: fx.GraphModule, context: Context, /) -> fx.GraphModule:
        """The rewritten step."""


@dataclass(frozen=True, slots=True)
class RegisteredPass:
    """A registered pass: ``target`` is the function, or the class whose instances are called."""

    name: str
    on: On
    target: Any

    @property
    def is_users(self) -> bool:
        """Whether it is none of reroll's own."""
        return str(getattr(self.target, "__module__", "")).partition(".")[0] != "reroll"

    def make(self) -> Callable[..., Any]:
        """The callable pass; a class is instantiated without arguments."""
        made: Callable[..., Any] = self.target() if isinstance(self.target, type) else self.target
        return made


def register_pass(name: str, on: On = "program") -> Callable[[T], T]:
    """Register a function ``(program, context) -> program``, or a dataclass whose instances are such functions.

    With ``on="loops"`` it is ``(loops: Capture) -> Capture``, before anything is traced.
    With ``on="step"`` it is ``(step: fx.GraphModule, context) -> fx.GraphModule``, and so with ``on="half"``, for the
    forward and the backward of a segment. Raises PassError for a name that is taken, except in ``__main__``, where a
    notebook may run a cell again.
    """
    if on not in get_args(On):
        raise PassError(f"Pass {name!r} is registered on {on!r}, but passes work on {', '.join(get_args(On))}.")

    def register(target: T) -> T:
        PASSES.add(RegisteredPass(name, on, target), target)
        return target

    return register


def _adopt(name: str, target: Any) -> None:
    """A plug-in that did not register itself is a pass on programs."""
    register_pass(name)(target)


PASSES: Registry[RegisteredPass] = Registry("pass", PassError, group="reroll.passes", adopt=_adopt)


def find(name: str) -> RegisteredPass:
    """The pass that is registered under a name; plug-ins are loaded when they are asked for. Raises PassError."""
    importlib.import_module("reroll.passes")
    return PASSES.find(name)


def entries() -> tuple[RegisteredPass, ...]:
    """All passes that are known, by name, those of plug-ins loaded. Raises PassError where one cannot be."""
    importlib.import_module("reroll.passes")
    return tuple(sorted(PASSES.values(), key=attrgetter("name")))


def pass_names(passes: Sequence[str] | str) -> tuple[str, ...]:
    """Names from a tuple, or from a comma-separated string; the order is as written."""
    if isinstance(passes, str):
        return tuple(name.strip() for name in passes.split(",") if name.strip())
    return tuple(passes)


def _apply(entry: RegisteredPass, expected: type[T], *given: Any) -> T:
    """Run one pass. Raises PassError if it raises, or returns another type than it was given."""
    try:
        result = entry.make()(*given)
    except Exception as error:
        raise PassError(f"Pass {entry.name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, expected):
        wanted, found = expected.__name__, type(result).__name__
        raise PassError(f"Pass {entry.name!r} must return a {wanted}, but it returned a {found}. Return the result.")
    return result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's cycle collector: passes make many objects and no garbage, and it takes half of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def run(passes: Sequence[str] | str, program: Program, context: Context) -> Program:
    """Run the passes on a program, in order, and check it after each; passes on the step are skipped.

    Raises PassError, which names the pass and, for an illegal program, the node and the rule.
    """
    check(program)
    for entry in [find(name) for name in pass_names(passes)]:
        if entry.on != "program":
            continue
        result = _apply(entry, Program, program, context)
        if (result.steps, result.segment) != (program.steps, program.segment):
            raise PassError(f"Pass {entry.name!r} changed the steps or the segment of the program. Keep them.")
        try:
            with blamed_on(entry.name, "a program that cannot be checked"):
                check(result)
        except IllegalProgramError as error:
            raise PassError(f"Pass {entry.name!r} returned an illegal program. {error}") from error
        program = result
    return program


def run_on_loops(passes: Sequence[str] | str, found: Capture, module: nn.Module) -> Capture:
    """Run those of the passes that are declared for loops, in order, on those that were found in a module's graph.

    Raises PassError, also where a pass of the user's changed what the graph is given or gives.
    """
    *_, last = loops_by_pass(passes, found, module).values()
    return replace(last, captured=found) if found.recurrences else found


def loops_by_pass(passes: Sequence[str] | str, found: Capture, module: nn.Module) -> dict[str, Capture]:
    """The loops as they were ``captured``, and behind each pass that changed them, by its name. Raises PassError."""
    if found.recurrences:
        found = replace(found, outer=copy_with_examples(found.outer))
    made = {"captured": found}
    for entry in [find(name) for name in pass_names(passes)]:
        if entry.on == "loops" and found.recurrences:
            before, found = found, _apply(entry, Capture, found)
            if entry.is_users:
                try_loops(before, found, module, entry.name)
            if found is not before:
                made[entry.name] = found
    return made


def run_on_step(passes: Sequence[str] | str, step: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Run those of the passes that are declared for the step graph, in order. Raises PassError."""
    for entry in [find(name) for name in pass_names(passes)]:
        if entry.on != "step":
            continue
        recurrence = context.recurrence
        before = try_step(step, recurrence, entry.name) if recurrence and entry.is_users else []
        step = _apply(entry, fx.GraphModule, step, context)
        if recurrence and entry.is_users and try_step(step, recurrence, entry.name) != before:
            raise PassError(f"Pass {entry.name!r} changed the results of a step. Keep their shapes and dtypes.")
        with blamed_on(entry.name, "a step that is no graph"):
            step.recompile()  # the graph is what counts: a pass may have left code that is another's
    return step


def run_on_half(passes: Sequence[str] | str, half: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Run those of the passes that are declared for halves of segments, in order.

    Raises PassError, also where a pass left a graph with other operands or results than it was given.
    """
    for entry in [find(name) for name in pass_names(passes)]:
        if entry.on == "half":
            half = _rewritten(entry, half, context)
    return half


def _rewritten(entry: RegisteredPass, half: fx.GraphModule, context: Context) -> fx.GraphModule:
    before, known = _signature(half), {(node.name, node.target) for node in half.graph.nodes}
    half = _apply(entry, fx.GraphModule, half, context)
    with blamed_on(entry.name, "a half of a segment that is no graph"):
        kept = _operands(half) == before[0]
    if kept and entry.is_users:
        try_half(half, entry.name)
        for node in half.graph.nodes:
            if (node.name, node.target) not in known:
                node.meta[PASS] = entry.name
    with blamed_on(entry.name, "a half of a segment that is no graph"):
        half.graph.lint()
        kept = kept and _signature(half) == before
    if not kept:
        raise PassError(f"Pass {entry.name!r} changed the operands or results of a segment. Keep them.")
    return half


def _operands(half: fx.GraphModule) -> list[str]:
    return [node.name for node in half.graph.find_nodes(op="placeholder")]


def _signature(half: fx.GraphModule) -> Any:
    """Names of the operands; shapes, dtypes and devices of the results."""
    results: Any = half.graph.output_node().args[0]
    values = [getattr(node, "meta", {}).get("val") for node in results]
    return _operands(half), [
        isinstance(value, Tensor) and (tuple(value.shape), value.dtype, value.device) for value in values
    ]
