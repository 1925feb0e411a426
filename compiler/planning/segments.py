"""Lengths of segments: how many steps are compiled together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from reroll.graph.memory import result_nbytes
from reroll.planning.options import Options
from reroll.program.registry import pass_names
from reroll.recurrence import Items, Recurrence
from reroll.schedules.machine import pieces
from reroll.segment.trace import linear_carries

_SEGMENT = {"inductor": 8, "eager": 4}
_SMALL = ((4096, 32), (8192, 16))  # bytes that a step makes, and steps for which calling a segment no longer counts
_LARGE = 1 << 22  # bytes that a step makes for which neither calls nor products count, if it makes
_OF_WEIGHTS = 4  # times the bytes of its weights
_BLOCK = 1 << 16  # bytes that blocks over depth make for which calling a segment no longer counts
_SOME, _FEWER = 8, 6  # operations of a step from which on as few steps are as fast, and are compiled sooner
_MANY, _OPERATIONS = 512, 256  # steps from which on they are worth compiling, operations in one of them at most
_LINEAR = 16  # steps of which carries that enter linearly are done together
_MOST = 1024  # operations in any segment of several steps: what is compiled together grows with them


def usual_segment(recurrence: Recurrence, options: Options) -> int:
    """Steps compiled together if nobody says otherwise: more where there are many that take less time than a call.

    Not so for schedules that are chosen where every byte counts. Fewer where a step has hundreds of operations, as one
    has that repeats with a period. Half as many where a step makes megabytes with small weights, as convolutions do:
    neither calls nor products of several steps that are brought together count then, and it starts sooner. More where
    carries enter linearly: of the steps of a segment one state is read and one written. Blocks over
    depth share no weights that products could be brought together for: one is a segment, unless it is tiny.
    """
    usual = _SEGMENT[options.lowering]
    if recurrence.blocks:
        made = sum(result_nbytes(node.meta.get("example_value")) for node in recurrence.step.graph.nodes)
        return min(usual, -(-_BLOCK // max(made, 1)))
    calls = [node for node in recurrence.step.graph.nodes if node.op.startswith("call")]
    weights = [_operations(node) for node in calls]
    limit = max(1, _MOST // max(sum(weights), 1))
    values = [node.meta.get("example_value") for node in calls]
    made = sum(weight * result_nbytes(value) for weight, value in zip(weights, values, strict=True))
    if _is_linear(recurrence, options, made):
        return min(_LINEAR, limit)
    usual = min(usual, limit)
    if _is_large(recurrence, made):
        return max(usual // 2, 1)
    if options.lowering == "eager":
        return usual
    if sum(weights) > _SOME and not _on_a_card(recurrence):  # to which calls take longer
        usual = min(usual, _FEWER)
    if options.moves_carries or recurrence.steps < _MANY:
        return usual
    if any(value is None for value in values):
        return usual
    fitting = (length for most, length in _SMALL if made <= most and length * sum(weights) <= _OPERATIONS)
    return next(fitting, usual)


def _is_linear(recurrence: Recurrence, options: Options, made: int) -> bool:
    """Whether most of what a step makes is of carries of which some steps are done together: what is written, what is
    left of the state, and their sum. That gains with the number of steps."""
    if options.passes is not None and "linear-steps" not in pass_names(options.passes):
        return False
    linear = linear_carries(recurrence)
    return 2 * sum(3 * result_nbytes(recurrence.examples[core.carry]) for core in linear) >= max(made, 1)


def _is_large(recurrence: Recurrence, made: int) -> bool:
    """Whether a step makes so much that neither calls nor its weights count. On a card, where such a step may take less
    time than its launches, that was not measured."""
    if _on_a_card(recurrence):
        return False
    held = sum(result_nbytes(recurrence.examples[number]) for number in recurrence.constants)
    return made >= max(_LARGE, _OF_WEIGHTS * held)


def _on_a_card(recurrence: Recurrence) -> bool:
    return any(example.device.type != "cpu" for example in recurrence.examples)


def _operations(call: fx.Node) -> int:
    """Operations that a call stands for: a cell of torch's is about a dozen."""
    return 12 if getattr(call.target, "__name__", "").endswith("_cell") else 1


def segment_length(recurrence: Recurrence, options: Options, *, whole: bool = False) -> int:
    """Steps compiled together: as asked for, else a length near the usual one that leaves the shortest last segment.

    Where the segments serve any number of steps it is what the first number asked for (``Recurrence.segment``), or what
    the user asked for, but for steps that are not there. A loop that reads a list has as many steps as that has items,
    at any length. ``whole``: a length that leaves no rest is looked for where nothing is compiled, too.
    """
    steps, usual = recurrence.steps, usual_segment(recurrence, options)
    if recurrence.any_length:
        items = [len(x.operands) for x in recurrence.xs if isinstance(x, Items)]
        asked = options.segment and min(options.segment, max(steps, usual))
        length = asked or recurrence.segment or _without_rest(recurrence, usual, options, whole)
        return min(length, *items) if items else length
    if options.segment is not None:
        return min(options.segment, steps)
    if recurrence.segment:
        return min(recurrence.segment, steps)
    if steps <= usual:
        return steps
    if options.truncate is not None:
        return _dividing(options.truncate, usual)
    lengths = range(usual // 2 + 1, min(usual + usual // 2, steps) + 1)
    return min(lengths, key=lambda k: (steps % k, abs(k - usual)))


def _without_rest(recurrence: Recurrence, usual: int, options: Options, whole: bool) -> int:
    """A length near the usual one that leaves no steps for shorter segments, which would have to be compiled too; the
    usual one where there is none, of a few steps, which say little of others, and where nothing is compiled, unless a
    ``whole`` number of segments is asked for."""
    if options.truncate is not None:
        return _dividing(options.truncate, usual)
    near = range(usual - usual // 3, usual + usual // 2 + 1) if whole or options.lowering == "inductor" else ()
    fitting = [length for length in near if recurrence.steps % length == 0 and recurrence.steps > 2 * usual]
    return min(fitting, key=lambda length: (abs(length - usual), -length), default=usual)


def _dividing(every: int, usual: int) -> int:
    """A length near the usual one of which whole ones fill, or nearly fill, so many steps."""
    if every <= usual:
        return every
    return min(range(usual // 2 + 1, usual + usual // 2 + 1), key=lambda k: (every % k, abs(k - usual)))


def lengths_of(recurrence: Recurrence, length: int, options: Options) -> tuple[int, ...]:
    """The lengths of the segments of a recurrence, if most are of this length.

    Where segments serve other numbers of steps too, what whole ones leave is made up of few lengths, which do so; and
    where gradients are cut, which may be within a segment.
    """
    rest = recurrence.steps % length
    if options.truncate is not None:
        return any_lengths(length, options)
    if recurrence.any_length or recurrence.segment:
        return (length, *(shorter for shorter, _ in pieces(rest, any_lengths(length, options)[1:])))
    return (length, rest) if rest else (length,)


def any_lengths(length: int, options: Options) -> tuple[int, ...]:
    """The lengths of segments that make up any number of steps, few of them short, if most are of this length."""
    usual = _SEGMENT[options.lowering]
    return (length, *([usual] if length >= 2 * usual else []), *([1] if length > 1 else []))


class SegmentLengths:
    """The lengths of the segments of a model's loops: what is compiled for one number of steps serves the others.

    whole: the first one has no rest, where that can be, which would have to be traced before its first call.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.known, self.whole = dict[Any, int](), whole

    def fixed(self, kind: Any, recurrence: Recurrence, options: Options) -> Recurrence:
        """A loop, of all that are of one ``kind``, whose segments are as long as for the first number of steps, of
        those that have one usual length."""
        key = kind, usual_segment(recurrence, options), options.lowering
        length = self.known.get(key, 0)
        if not length and recurrence.steps:
            length = self.known[key] = segment_length(recurrence, options, whole=self.whole)
        return replace(recurrence, segment=length)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, lengths are chosen for what may never run: all is as it was afterwards."""
        known = dict(self.known)
        try:
            yield
        finally:
            self.known = known


def segment_lengths(recurrence: Recurrence, options: Options) -> list[int]:
    """Lengths to try in turn: under a budget also shorter ones, which need less at a time, down to one step."""
    lengths = [segment_length(recurrence, options)]
    while options.memory_budget is not None and options.segment is None and lengths[-1] > 1:
        lengths.append(lengths[-1] // 2)
    return lengths
