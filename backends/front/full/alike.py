"""Which programs of a model need no proof of their own, as programs like them were proved at other lengths.

A record says nothing of another length, so what was found in it is a matter of that record alone, and a proof of its
own is the rule. It is left out where nothing is left that could be wrong by itself: all segments were proved before;
the graph around the loops, what these read, and where results go are the same but for whole numbers; and each of these
numbers is on the line through those of two programs that were proved, at two lengths (or the same as in one of them).
A number that all steps read alike, or that is no whole one and stands around the loops, may be any: it is the record's
own, no pass makes such numbers, and what computes with it was proved with two others. Of such programs the fourth, the
eighth, the sixteenth ... are proved all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from reroll.backends.construct.kernels import Kernels, attribute_content, content
from reroll.backends.construct.plan import Built
from reroll.backends.dynamo.entry import Graph
from reroll.backends.front.recorded import Recording, ResultSlot
from reroll.capture.recorder.identity import PLAIN, Same
from reroll.graph.effects import attribute
from reroll.graph.nested import opened
from reroll.recurrence import Items, Numbers, Slices

LIKE = "programs of the same segments, with the same around them, were at other lengths"
_KINDS = 64  # of programs that are known
_ENOUGH = 2  # lengths, which say what line a number is on


@dataclass(frozen=True, slots=True)
class Outline:
    """A program without the kernels of its loops: ``text`` is equal for those that are the same but for ``numbers``.
    ``tables``: numbers that steps read, each for its step. ``steps``: of its first loop."""

    text: Any
    numbers: tuple[int, ...]
    tables: tuple[tuple[float, ...], ...]
    steps: int

    @classmethod
    def of(cls, graph: Graph, recording: Recording) -> Outline:
        """That of a graph, and where the operands and results of a record belong."""
        writer = _Writer({each.name: each for each in graph.built})
        text = [writer.graph(graph.module), *map(writer.loop, graph.built)]
        text += writer.recording(recording)
        numbers, tables = tuple(writer.numbers), tuple(writer.tables)
        return cls(_hashable(text), numbers, tables, graph.built[0].executable.recurrence.steps)

    def follows(self, one: Outline, other: Outline) -> bool:
        """Whether all numbers are those of one of two others, or on the line through both."""
        if any(self.numbers == each.numbers and self.tables == each.tables for each in (one, other)):
            return True
        far, here = other.steps - one.steps, self.steps - one.steps
        lines = zip(one.numbers, other.numbers, self.numbers, strict=True)
        on_lines = all((last - first) * here == (value - first) * far for first, last, value in lines)
        return far != 0 and on_lines and all(map(_alike, one.tables, other.tables, self.tables))


def _alike(one: tuple[float, ...], other: tuple[float, ...], this: tuple[float, ...]) -> bool:
    """Whether one of three tables is like the others. A number that is the same at all steps may be any."""
    return all(len(set(each)) == 1 for each in (one, other, this)) or _continues(one, other, this)


def _continues(one: tuple[float, ...], other: tuple[float, ...], this: tuple[float, ...]) -> bool:
    """Whether the shorter ones of three tables are the beginnings of the longest."""
    longest = max(one, other, this, key=len)
    return len(this) <= max(len(one), len(other)) and all(each == longest[: len(each)] for each in (one, other, this))


@dataclass(slots=True)
class _Kind:
    """Programs of one text: how many there were, and the first two lengths at which they were proved."""

    count: int = 0
    proved: list[Outline] = field(default_factory=list)


class Alike:
    """What was proved of the programs of one model."""

    def __init__(self) -> None:
        self._kinds = dict[Any, _Kind]()
        self._segments = weakref.WeakKeyDictionary[Kernels, set[int]]()

    def due(self, graph: Graph, outline: Outline) -> bool:
        """Whether a program, which is new, is to be proved."""
        if outline.text not in self._kinds and len(self._kinds) >= _KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault(outline.text, _Kind())
        kind.count += 1
        fresh = any(length not in self._segments.get(kernels, ()) for kernels, length in _segments(graph))
        like = not fresh and len(kind.proved) == _ENOUGH and outline.follows(*kind.proved)
        return not like or kind.count & (kind.count - 1) == 0

    def note(self, graph: Graph, outline: Outline) -> None:
        """A program was proved, its gradients too, if it has any."""
        for kernels, length in _segments(graph):
            self._segments.setdefault(kernels, set()).add(length)
        kind = self._kinds.setdefault(outline.text, _Kind())
        if len(kind.proved) < _ENOUGH and all(each.steps != outline.steps for each in kind.proved):
            kind.proved.append(outline)


def _segments(graph: Graph) -> Iterator[tuple[Kernels, int]]:
    return ((each.kernels, length) for each in graph.built for length in each.executable.compiled.segments)


class _Writer:
    """Writes down what a program is, numbers apart."""

    def __init__(self, loops: Mapping[str, Built]) -> None:
        self.loops, self.numbers, self.tables = loops, list[int](), list[tuple[float, ...]]()
        self.floats = list[str]()

    def graph(self, module: fx.GraphModule) -> Any:
        """A graph, with what it holds."""
        places, text = dict[Any, int](), list[Any]()
        for place, node in enumerate(module.graph.nodes):
            places[node] = place
            what: Any = None
            if node.op in ("get_attr", "call_module") and node.target not in self.loops:
                what = attribute_content(attribute(module, node))
                what = Same(object()) if isinstance(what, Same) else what  # nothing is kept alive, and is like no other
            elif node.op != "placeholder":
                what = node.target if isinstance(node.target, str) else Same(node.target)
            given = () if node.op == "placeholder" else (node.args, dict(node.kwargs))
            operands = self.said(given, places)
            text.append((node.op, what, operands, self.said(node.meta.get("example_value"))))
        return text

    def recording(self, recording: Recording) -> list[Any]:
        """Where operands and results of a record belong, and what it asks and sets."""
        found = (recording.skeleton, recording.changed, [*recording.sizes.items()], recording.asked)
        flags = [(Same(space), name, value) for space, name, value in recording.flags]
        return [*map(self.said, found), tuple(recording.cleared), flags]

    def loop(self, built: Built) -> Any:
        """What a loop reads and gives, and its step."""
        loop = built.executable.recurrence
        reads = [self._read(x) for x in loop.xs]
        self.numbers += (loop.steps, *(number for kept in loop.kept_rows for number in (kept.first, kept.every)))
        sizes = len(loop.carries), loop.constants, len(loop.ys), loop.grad_enabled, loop.dropped
        return sizes, reads, content(built.kernels.captured), [self.said(each) for each in loop.examples]

    def _read(self, x: Slices | Items | Numbers) -> Any:
        if isinstance(x, Slices):
            self.numbers += (x.start, x.stride)
            return "slices", x.operand, x.dim
        if isinstance(x, Items):
            return "items", x.operands
        self.tables.append(x.values)
        return "numbers", x.dtype

    def said(self, value: Any, places: Mapping[Any, int] | None = None) -> Any:
        """A value, but for the numbers in it."""
        if type(value) in (int, float):
            self.numbers += [value] * (type(value) is int)
            self.floats += [repr(value)] * (type(value) is float)
            return type(value)
        if isinstance(value, fx.Node):
            return fx.Node, (places or {})[value]
        if isinstance(value, Tensor):
            self.numbers += (*value.shape, *value.stride())
            return Tensor, value.ndim, value.dtype, value.device, value.requires_grad
        if isinstance(value, slice):
            return slice, [self.said(each, places) for each in (value.start, value.stop, value.step)]
        inside = (value.index, value.value) if isinstance(value, ResultSlot) else opened(value)
        if isinstance(inside, Mapping):
            return type(value), [(self.said(key), self.said(each, places)) for key, each in inside.items()]
        if isinstance(inside, tuple | list):
            return type(value), [self.said(each, places) for each in inside]
        return (type(value), repr(value)) if type(value) in PLAIN else Same(value)


def in_words(recording: Recording) -> Any:
    """Where operands and results of a record belong, and what it asks and sets; equal for two that do the same."""
    writer = _Writer({})
    return _hashable(writer.recording(recording)), tuple(writer.numbers), tuple(writer.floats)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, tuple | list) else value
