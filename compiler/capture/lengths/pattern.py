"""The pattern of a model's operations in the number of steps T, and whether a run at some T follows it.

Three recordings at short lengths give the pattern: stretches that are run once, and loops whose number of runs is
affine in T. Every number of every event is then ``a + b r + c T`` at run r of its loop, but for a few first and last
runs, which have numbers of their own. A recording at the full length must be what the pattern predicts, event by event.
Numbers of the user's that are no such function (``1 / T``, ``0.9 ** t``) are *free*: they are read from the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reroll.capture.lengths.forms import Affine, Form, Rows, find_forms
from reroll.capture.lengths.liveness import live_events
from reroll.capture.lengths.template import ADVICE
from reroll.capture.recorder.events import LITERALS, SIZE, markers
from reroll.capture.steps.operands import MIN_STEPS
from reroll.capture.steps.search import repeats
from reroll.errors import LengthError


@dataclass(frozen=True, slots=True)
class Slot:
    """One event of a stretch: its colour, and its numbers in the first runs, the last ones (last first), the others."""

    colour: int
    kinds: tuple[str, ...]
    head: tuple[Form, ...]
    tail: tuple[Form, ...]
    middle: Form

    def form(self, run: int, count: int) -> tuple[Form, int]:
        """The form that holds at a run of ``count``, and the run to apply it to."""
        if run < len(self.head):
            return self.head[run], 0
        if count - run <= len(self.tail):
            return self.tail[count - run - 1], 0
        return self.middle, run


@dataclass(frozen=True, slots=True)
class Stretch:
    """Events that are run ``count(T)`` times, one after another."""

    slots: tuple[Slot, ...]
    count: Affine


@dataclass(frozen=True, slots=True)
class EventTrace:
    """A recording at a short length: colours and numbers of all events, and the user's line of each.

    ``given``: the event that made each tensor of the result, by its place in it. ``sizes``: those of what each made.
    ``added``: how many tensors the model added to lists that were there before.
    """

    length: int
    colours: list[int]
    numbers: Rows
    lines: list[str]
    given: dict[tuple[Any, ...], int | None]
    sizes: list[Any] = field(default_factory=list)
    added: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """What a model does at every length that it follows.

    ``anchors`` says of tensors of the result, by their place in it, whether the run of the loop that makes them counts
    from the ``first`` or from the ``last``.
    """

    lengths: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    palette: dict[Any, int]
    literals: tuple[Literal, ...]
    anchors: dict[tuple[Any, ...], str]
    changes_inputs: bool = False

    def reads_as(self, other: Pattern) -> bool:
        """Whether the user's numbers and texts are those of another pattern of the same lengths."""
        return self is other or self._read() == other._read()

    def _read(self) -> Any:
        names = {number: colour for colour, number in self.palette.items()}
        live = [(each.stretch, each.slot, each.column, each.values) for each in self.literals if each.live]
        texts = [[x for x in names[slot.colour] if _is_text(x)] for each in self.stretches for slot in each.slots]
        return live, texts


def _is_text(item: Any) -> bool:
    """Whether part of a colour is a text or the like of the user's, with its type."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], type)


@dataclass(frozen=True, slots=True)
class Literal:
    """A number of the user's: where it is, and its values at every run, at each of the pattern's lengths.

    ``live``: whether anything of the model can depend on what is made of it.
    """

    stretch: int
    slot: int
    column: int
    values: tuple[tuple[int | float, ...], ...]
    line: str
    live: bool = True


def find_pattern(
    traces: Sequence[EventTrace], palette: dict[Any, int], free: tuple[str, ...] = (), multiple: int = 1
) -> Pattern:
    """The pattern of three recordings, shortest first. Raises LengthError if there is none.

    free: kinds of the user's numbers that may be no affine function of run and length; so may sizes outside of loops,
    where no step is cut to them. multiple: how many steps are one
    run of a loop, for loops whose numbers have a period. A loop whose operations have that period is no longer then.
    """
    names = {number: colour for colour, number in palette.items()}
    lengths = tuple(trace.length for trace in traces)
    share = multiple / lengths[-1] if multiple > 1 else 0.0
    layout = list(_layout(np.array(traces[-1].colours, np.int32), 0, share))
    layout = _only_loops(layout, [_parse(trace, traces[-1].colours, layout) for trace in traces])
    parsed = [_parse(trace, traces[-1].colours, layout) for trace in traces]
    live = [live_events(trace.colours, trace.numbers, names) for trace in traces]
    stretches, literals = [], []
    for at, (start, period, repeated) in enumerate(layout):
        counts = [starts[at][1] for starts in parsed]
        count = Affine.through(lengths, counts)
        if count is None or (not repeated and counts != [1] * len(traces)):
            raise _no_function(traces[-1].lines[start], counts, lengths, "no affine function of the length")
        if count.b < 0:
            raise _no_function(traces[-1].lines[start], counts, lengths, "fewer times the longer a sequence is")
        slots = []
        for place in range(period):
            event = start + place
            colour = traces[-1].colours[event]
            kinds = tuple(markers(names[colour]))
            rows = [
                [trace.numbers[starts[at][0] + place + period * r] for r in range(starts[at][1])]
                for trace, starts in zip(traces, parsed, strict=True)
            ]
            loose = free if repeated else (*free, SIZE)
            head, tail, middle = find_forms(lengths, rows, kinds, loose, traces[-1].lines[event])
            slots.append(Slot(colour, kinds, head, tail, middle))
            line = traces[-1].lines[event]
            read = any(_any_run(found, place, period, *starts[at]) for found, starts in zip(live, parsed, strict=True))
            for column, kind in enumerate(kinds):
                if kind in LITERALS:
                    values = tuple(tuple(row[column] for row in each) for each in rows)
                    literals.append(Literal(at, place, column, values, line, read))
        stretches.append(Stretch(tuple(slots), count))
    anchors = dict(_anchors(traces, parsed, [period for _, period, _ in layout]))
    return Pattern(lengths, tuple(stretches), palette, tuple(literals), anchors)


def _no_function(line: str, counts: Sequence[int], lengths: Sequence[int], what: str) -> LengthError:
    runs, at = ", ".join(map(str, counts)), ", ".join(map(str, lengths))
    return LengthError(f"The loop at {line} is run {runs} times at lengths {at}, which is {what}. {ADVICE}")


def _any_run(events: frozenset[int], place: int, period: int, start: int, count: int) -> bool:
    """Whether the event at a place of a loop is among some events in any of the loop's runs."""
    return any(start + place + period * run in events for run in range(count))


def _anchors(
    traces: Sequence[EventTrace], parsed: Sequence[list[tuple[int, int]]], periods: list[int]
) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Of each tensor that every run gives at the same place: from where the run of the loop that makes it counts."""
    for place in set.intersection(*(set(trace.given) for trace in traces)):
        first, last = set(), set()
        for trace, stretches in zip(traces, parsed, strict=True):
            event = trace.given[place]
            for at, ((start, count), period) in enumerate(zip(stretches, periods, strict=True)):
                if event is not None and start <= event < start + count * period:
                    run, slot = divmod(event - start, period)
                    first.add((at, slot, run))
                    last.add((at, slot, count - run))
        if len(first) == 1 or len(last) == 1:
            yield place, "first" if len(first) == 1 else "last"


def _layout(colours: Any, offset: int, share: float) -> Iterator[tuple[int, int, bool]]:
    """(start, period, whether it repeats) of the stretches of a sequence of colours, in order.

    share: of all steps, those that one run makes at least.
    """
    runs = repeats(colours)
    if not runs:
        if len(colours):
            yield offset, len(colours), False
        return
    _, period, start, stop = runs[0]
    count = (stop - start) // period
    multiple = max(1, round(count * share))
    if count >= MIN_STEPS * multiple:
        period, count = period * multiple, count // multiple
    yield from _layout(colours[:start], offset, share)
    yield offset + start, period, True
    rest = start + count * period
    yield from _layout(colours[rest:], offset + rest, share)


def _only_loops(
    layout: Sequence[tuple[int, int, bool]], parsed: Sequence[list[tuple[int, int]]]
) -> list[tuple[int, int, bool]]:
    """The stretches, where equal operations in a row that are as many at every length are no loop.

    ``0.9 * h + 0.5 * (0.3 * x)`` has three of them, and each has a number of its own.
    """
    made = []
    for at, (start, period, repeated) in enumerate(layout):
        counts = {starts[at][1] for starts in parsed}
        fixed = repeated and len(counts) == 1
        made.append((start, period * counts.pop(), False) if fixed else (start, period, repeated))
    return made


def _parse(trace: EventTrace, model: list[int], layout: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """(start, runs) of each stretch in a recording.

    A loop is run as often as the stretches behind it let it be: the first of them may begin within what looks like one
    more run.
    """
    colours, furthest = trace.colours, 0

    def parsed(number: int, at: int) -> list[tuple[int, int]] | None:
        nonlocal furthest
        furthest = max(furthest, at)
        if number == len(layout):
            return [] if at == len(colours) else None
        start, period, repeated = layout[number]
        template, most = model[start : start + period], 0
        while colours[at + most * period : at + (most + 1) * period] == template and (repeated or not most):
            most += 1
        for runs in range(most, -1 if repeated else 0, -1):
            rest = parsed(number + 1, at + runs * period)
            if rest is not None:
                return [(at, runs), *rest]
        return None

    found = parsed(0, 0)
    if found is None:
        line = trace.lines[min(furthest, len(trace.lines) - 1)]
        raise LengthError(
            f"What the model does at {trace.length} steps differs from other lengths, at {line}. {ADVICE}"
        )
    return found
