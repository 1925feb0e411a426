"""Follows a loop that is open: compares what comes with what is expected, runs it, and counts.

It is the innermost loop of a record, which a long sequence goes through millions of times, so it calls as little as it
can. What compares the operands of an operation is written as a function, once for all operations whose operands are of
the same kinds.

Private torch API, tried on 2.11 and 2.13: ``_version`` and ``_cdata`` are what ``graph/private.py`` says of them, and
``_len_torch_dispatch_stack`` counts modes that see what is inside of operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from reroll.capture.recorder.events import History
from reroll.capture.recorder.hidden_effects import Alive, States, Versions, noted
from reroll.capture.recorder.repeats import NUMBER, TENSOR, Event, Loop, Repeats, same
from reroll.graph.nested import tensors_of
from reroll.graph.private import any_autocast, storage_id, unseen

_MATCHERS = 1024
Written = tuple[Tensor, ...]
Match = Callable[..., Written | None]


class Recorder(Protocol):
    """What is recorded so far. ``calling``: an operation runs; ``writing``: what runs is the recorder's own."""

    repeats: Repeats
    known: Alive
    versions: Versions
    history: History
    states: States
    inference: bool
    calling: bool
    writing: bool
    noting: Any

    def check_states(self) -> None:
        """Refuse random numbers that were drawn or set unseen."""


@dataclass(slots=True, frozen=True)
class _Expected:
    """An event of a loop, by what ``match`` compares operands with: their ``leaves`` at the run that was written, by
    how much they grow (``slopes``), and the place that none may reach (``bounds``)."""

    event: Event
    match: Match
    leaves: list[Any]
    slopes: list[int]
    bounds: list[float]


class Follower:
    """Follows the loop that is open in a record."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.loop: Loop | None = None
        self.expected = list[_Expected]()

    def follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> tuple[bool, Any]:
        """Run an operation where it is the one that is expected: whether it gave what is expected, and the result,
        NotImplemented where it was not run. If it is another one, the loop ends."""
        recorder, loop = self.recorder, self.recorder.repeats.loop
        assert loop is not None
        if self.loop is not loop:
            self._open(loop)
        expected = self.expected[loop.at]
        event = expected.event
        recorder.writing = True
        try:
            written: Written | None = None
            if event.func == func and not any_autocast() and torch.is_inference_mode_enabled() is recorder.inference:
                known, versions = recorder.known, recorder.versions.known
                leaves, slopes, bounds = expected.leaves, expected.slopes, expected.bounds
                written = expected.match(args, kwargs, loop.run, known, versions, leaves, slopes, bounds)
            if written is None:
                self._end()
                return False, NotImplemented
            if event.draws:
                recorder.check_states()
            result = self._run(func, run, args, kwargs)
            if not self._gives(event, loop, result):
                self._end()
                return False, result
            if event.draws:
                recorder.states.note()
            if written:
                recorder.versions.updated({storage_id(value) for value in written})
            return True, result
        finally:
            recorder.writing = False

    def _open(self, loop: Loop) -> None:
        self.loop = loop
        self.expected = [
            _Expected(
                event,
                _matcher(event.kinds, event.writes),
                event.leaves,
                slopes,
                [float("inf") if slope in (0, loop.size) else loop.start for slope in slopes],
            )
            for event, slopes in zip(loop.events, loop.slopes, strict=True)
        ]

    def _end(self) -> None:
        self.loop = None
        self.recorder.repeats.end()

    def _run(self, func: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives that is not written down; one like it was watched. Python code that it is made of is
        noted, but for that of operators of users'."""
        recorder = self.recorder
        recorder.calling, recorder.writing = True, False
        try:
            with nullcontext() if torch._C._len_torch_dispatch_stack() > 1 else unseen():
                if isinstance(func, FunctionType | type) and recorder.noting is not None:
                    with noted(recorder.noting):
                        return run(*args, **kwargs)
                return run(*args, **kwargs)
        finally:
            recorder.calling, recorder.writing = False, True

    def _gives(self, event: Event, loop: Loop, result: Any) -> bool:
        """Whether an event gave what it gives in each run. Notes the tensors that it made, and goes on to the next."""
        recorder = self.recorder
        values = (result,) if isinstance(result, Tensor) else tensors_of(result)
        known, versions = recorder.known, recorder.versions
        if len(values) != len(event.looks):
            return False
        for value, look, place in zip(values, event.looks, event.fresh, strict=True):
            if (value.shape, value.stride(), value.dtype, value.device, value.requires_grad) != look:
                return False
            found = known.get(id(value))
            if (found is not None and found[0]() is value) == (place >= 0):
                return False
        further = loop.run * loop.size
        for value, place in zip(values, event.fresh, strict=True):
            if place >= 0:
                number, alive = id(value), weakref.ref(value)
                known.put(number, (alive, place + further))
                if value.layout is torch.strided:
                    memory = value.untyped_storage()._cdata
                    version = 0 if value.is_inference() else value._version
                    versions.known.put(number, (alive, version, (memory, value.storage_offset())))
                    versions.sharing.setdefault(memory, {})[number] = alive
                recorder.history.made(value, alive)
        recorder.repeats.count += event.size
        loop.at += 1
        if loop.at == len(loop.events):
            loop.run, loop.at = loop.run + 1, 0
            known.prune()
            versions.prune()
        return True


@lru_cache(_MATCHERS)
def _matcher(kinds: tuple[Any, ...], writes: tuple[int, ...]) -> Match:
    """Compares operands of these kinds with those that are expected: those of them that are written; None where they
    are others."""
    space: dict[str, Any] = {"Tensor": Tensor, "Parameter": nn.Parameter, "same": same}
    remaining = iter(enumerate(kinds))
    next(remaining)  # the pair of arguments and keywords
    lines = [*_compared("args", remaining, space), *_compared("kwargs", remaining, space)]
    body = "".join(f"    {line}\n" for line in lines)
    results = "".join(f"v{at}, " for at in writes)
    text = f"def match(args, kwargs, run, known, versions, leaves, slopes, bounds):\n{body}    return ({results})\n"
    exec(text, space)  # of nothing but numbers and the names above
    found: Match = space["match"]
    return found


def _compared(text: str, remaining: Iterator[tuple[int, Any]], space: dict[str, Any]) -> Iterator[str]:
    """The lines that compare one operand, which stands in ``text``, and what it holds."""
    at, kind = next(remaining)
    yield f"v{at} = {text}"
    if kind is TENSOR:
        yield from (line.format(v=f"v{at}", at=at) for line in _OF_TENSORS)
    elif kind == (NUMBER, int):
        yield f"if type(v{at}) is not int or v{at} != leaves[{at}] + slopes[{at}] * run: return None"
    elif isinstance(kind, type) or kind[0] is NUMBER:
        space[f"k{at}"] = kind if isinstance(kind, type) else kind[1]
        if kind is slice:
            yield f"if type(v{at}) is not slice: return None"
            parts = [f"v{at}.{name}" for name in ("start", "stop", "step")]
        else:
            yield f"if type(v{at}) is not k{at}: return None"
            yield f"if v{at} is not leaves[{at}] and not same(v{at}, leaves[{at}]): return None"
            parts = []
        for part in parts:
            yield from _compared(part, remaining, space)
    else:
        space[f"k{at}"], space[f"n{at}"] = kind[0], tuple(kind[1:])
        held = f"tuple(v{at}) != n{at}" if kind[0] is dict else f"len(v{at}) != {kind[1]}"
        yield f"if type(v{at}) is not k{at} or {held}: return None"
        count = len(kind) - 1 if kind[0] is dict else kind[1]
        if kind[0] is dict:
            yield f"v{at} = tuple(v{at}.values())"
        for number in range(count):
            yield from _compared(f"v{at}[{number}]", remaining, space)


_OF_TENSORS = (
    "if type({v}) is not Tensor and type({v}) is not Parameter: return None",
    "place, found = leaves[{at}] + slopes[{at}] * run, known.get(id({v}))",
    "if found is None or found[1] != place or place >= bounds[{at}] or found[0]() is not {v}: return None",
    "found = versions.get(id({v}))",
    "if found is not None and found[0]() is {v}:",
    "    if found[1] != (0 if {v}.is_inference() else {v}._version): return None",
    "    if found[2] != ({v}.untyped_storage()._cdata, {v}.storage_offset()): return None",
)
"""A tensor is at the place that is expected, which is none of this loop but of the last run, and unchanged since."""
