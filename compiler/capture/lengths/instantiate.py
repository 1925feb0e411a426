"""A capture for any number of steps, from a template of a few short ones and a check of a run at the full length."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from reroll.capture.lengths.align import row_of
from reroll.capture.lengths.check import Check, Literals
from reroll.capture.lengths.forms import Affine
from reroll.capture.lengths.sized import with_sizes
from reroll.capture.lengths.template import ADVICE, LoopTemplate, Progression, RowRun, Sized, Template, Varies
from reroll.capture.steps.outer import COLLECTED
from reroll.errors import LengthError
from reroll.graph.lines import where
from reroll.recurrence import Numbers, PerStep, Recurrence, Slices


class TooShortError(LengthError):
    """A sequence is so short that its first and last steps, which differ from the others, meet."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """The outer graph and the recurrences at one length.

    ``outputs`` says what Dynamo's outputs were made of at the template's last length: one value each, or a run of
    ``outputs[i]`` values, of which the graph gives a tuple.
    """

    length: int
    outer: fx.Graph
    recurrences: tuple[Recurrence, ...]
    outputs: tuple[int | None, ...]


def instantiate(template: Template, check: Check) -> Instance:
    """The template at the length of a check. Raises LengthError where a number at that length is not known, and
    TooShortError where a loop has fewer steps than are read behind it.
    """
    builder = _Builder(template, check, Literals(check))
    for node, args, kwargs in template.nodes:
        builder.emit(node, args, kwargs)
    recurrences = tuple(_recurrence(loop, builder) for loop in template.loops)
    builder.graph.lint()
    unasked = builder.literals.unasked()
    if unasked is not None:
        seen = ", ".join(map(repr, unasked.values[-1][:4]))
        raise LengthError(
            f"The number at {unasked.line} ({seen}, ...) changes with the steps or their number in a way that is not "
            f"known. Pass it as a tensor with time. {ADVICE}"
        )
    return Instance(check.length, builder.graph, recurrences, tuple(builder.outputs))


def _recurrence(loop: LoopTemplate, builder: _Builder) -> Recurrence:
    steps = builder.whole(loop.steps, loop.recurrence.where)
    if steps < 0:
        raise TooShortError(
            f"{builder.check.length} steps are fewer than those before and behind the loop at {loop.recurrence.where}."
        )
    xs = list[PerStep]()
    for x in loop.xs:
        if isinstance(x, Slices):
            xs.append(replace(x, start=builder.whole(x.start, loop.recurrence.where)))
        elif isinstance(x, Numbers):
            xs.append(Numbers(builder.numbers(x.values, steps, loop.recurrence.where)))
        else:
            xs.append(x)
    found = replace(loop.recurrence, steps=steps, xs=tuple(xs), any_length=True)
    return found if loop.sized is None else _resized(found, loop.sized, builder)


def _resized(recurrence: Recurrence, sized: Sized, builder: _Builder) -> Recurrence:
    """A recurrence with the step, and examples of the sizes, of one length."""
    inner = _Builder(builder.template, builder.check, builder.literals)
    for node, args, kwargs in sized.nodes:
        inner.copy(node, args, kwargs)
    shapes = [tuple(builder.whole(n, recurrence.where) for n in shape) for shape in sized.shapes]
    return with_sizes(recurrence, inner.graph, shapes)


class _Builder:
    """Emits nodes with the numbers of one length."""

    def __init__(self, template: Template, check: Check, literals: Literals) -> None:
        self.template, self.lengths, self.check, self.literals = template, template.lengths, check, literals
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()
        self.outputs: list[int | None] = []
        self.loops = {loop.recurrence.name: loop for loop in template.loops}

    def emit(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """One node of the template."""
        if node.op == "output":
            given = args[0] if isinstance(args[0], tuple | list) else (args[0],)
            self.outputs = [len(self._old(item)) if isinstance(item, RowRun) else None for item in given]
            self.graph.output(tuple(self._value(item, node) for item in given))
            return
        made = self.copy(node, args, kwargs)
        if (row := row_of(node)) is not None:
            index: Any = made.args[1]
            self._check_rows(row[0].args[0], (index,), (row[1],), where(node))
        elif COLLECTED in node.meta and node.target in (torch.narrow, operator.getitem):
            self._check_rows(node.args[0], _taken(made.args), _taken(node.args), where(node))

    def copy(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """A node with its operands at this length."""
        operands = tuple(self._value(value, node) for value in args)
        named = {name: self._value(value, node) for name, value in kwargs.items()}
        made = self.env[node] = self.graph.create_node(node.op, node.target, operands, named, name=node.name)
        made.meta = dict(node.meta)
        return made

    def _old(self, run: RowRun) -> range:
        """The rows of a run at the template's last length."""
        first, stride, count = (self._last(x) for x in (run.start, run.stride, run.count))
        return range(first, first + stride * count, stride)

    def _last(self, value: Any) -> Any:
        return value.values[-1] if isinstance(value, Varies) else value

    def _value(self, value: Any, node: fx.Node) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(item, RowRun) for item in value):
            pieces = [self._value(item, node) for item in value]
            runs = tuple(isinstance(item, RowRun) for item in value)
            return self.graph.call_function(joined, (runs, *pieces))
        if isinstance(value, list | tuple):
            return type(value)(self._value(item, node) for item in value)
        if isinstance(value, dict):
            return {name: self._value(item, node) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._value(item, node) for item in (value.start, value.stop, value.step)))
        if isinstance(value, RowRun):
            return self.graph.call_function(operator.getitem, (self.env[value.rows], self._rows(value, node)))
        if isinstance(value, Progression):
            first, stride, count = (self.whole(x, where(node)) for x in (value.first, value.stride, value.count))
            return tuple(range(first, first + stride * count, stride))
        if isinstance(value, Varies):
            return self.number(value.values, where(node))
        return self.env[value] if isinstance(value, fx.Node) else value

    def _rows(self, run: RowRun, node: fx.Node) -> slice:
        start, stride, count = (self.whole(x, where(node)) for x in (run.start, run.stride, run.count))
        stop = start + stride * count
        self._check_rows(run.rows.args[0], range(start, stop, stride), self._old(run), where(node))
        return slice(start, stop if stop >= 0 else None, stride)

    def _check_rows(self, stacked: Any, rows: Sequence[int], old: Sequence[int], line: str) -> None:
        """Raise TooShortError where a loop does not have the steps whose outputs are read: rows from the first one on
        that were counted from there, ``old`` ones of the template, are not counted from the last one on."""
        loop = _loop_behind(stacked, self.loops)
        if loop is None or not rows:
            return
        steps = self.whole(loop.steps, line)
        kept = loop.recurrence.rows_of(stacked.args[1]).rows(steps)
        if min(rows) < (0 if min(old) >= 0 else -kept) or max(rows) >= kept:
            raise TooShortError(
                f"{self.check.length} steps leave {steps} for the loop at {loop.recurrence.where}, of which {line} "
                "reads more."
            )

    def whole(self, value: Any, line: str) -> int:
        """A whole number of the template at this length."""
        found = self.number(value.values, line) if isinstance(value, Varies) else value
        if type(found) is not int:
            raise LengthError(f"{found!r} at {line} is not a whole number. {ADVICE}")
        return found

    def number(self, values: tuple[int | float, ...], line: str) -> int | float:
        """The number that has these values at the template's lengths."""
        affine = Affine.through(self.lengths, values)
        found = affine(self.check.length) if affine is not None else self.literals.scalar(values)
        if found is None:
            raise LengthError(
                f"The number {values[-1]!r} at {line} depends on the number of steps in a way that is not known: "
                f"{', '.join(f'{v!r} at {n}' for n, v in zip(self.lengths, values, strict=True))}. {ADVICE}"
            )
        return found

    def numbers(self, values: Any, steps: int, line: str) -> tuple[int | float, ...]:
        """The numbers of a loop's steps: ``values`` are those at the template's lengths, or one for all steps."""
        if not isinstance(values[0], tuple):
            return (self.number(values, line),) * steps
        found = self.literals.sequence(values)
        if found is None or len(found) != steps:
            raise LengthError(
                f"The numbers that the loop at {line} uses step by step ({', '.join(map(repr, values[-1][:4]))}, ...) "
                "were not seen in a run of the model. Pass them as a tensor with time."
            )
        return tuple(found)


def _taken(args: Sequence[Any]) -> range:
    """The rows of a stack that capture takes."""
    if isinstance(args[1], slice):
        return range(args[1].start, args[1].stop, args[1].step)
    return range(args[2], args[2] + args[3])


def _loop_behind(stacked: fx.Node, loops: Mapping[str, LoopTemplate]) -> LoopTemplate | None:
    """The loop whose output this is, if it is one."""
    call: Any = stacked.args[0] if stacked.target is operator.getitem else None
    return loops.get(str(call.target)) if isinstance(call, fx.Node) and call.op == "call_module" else None


def joined(runs: tuple[bool, ...], *pieces: Any) -> list[Any]:
    """One list of single values and of runs of values."""
    return [item for run, piece in zip(runs, pieces, strict=True) for item in (piece if run else (piece,))]
