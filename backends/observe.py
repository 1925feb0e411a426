"""Runs of a model that are only looked at: short ones that show its pattern, and one at the full length that checks it.

The model, its arguments, its Python state and the random numbers are afterwards as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from reroll.backends.randomness import random_numbers_kept
from reroll.backends.state import State
from reroll.backends.times import Call, first_steps, tensors_of
from reroll.errors import LengthError, UnsupportedError
from reroll.pattern import Check, Departure, Pattern, Trace, find_pattern
from reroll.recording import Numbers, Recorder, Sink, recording, user_line

_SHORT = ((8, 9, 11), (16, 17, 19), (32, 33, 35))
_LONGEST_PERIOD = 16


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """A pattern that a run of the model at one length followed, and what that run returned but for its tensors."""

    pattern: Pattern
    check: Check
    structure: TreeSpec
    leaves: tuple[Any, ...]


def observe(model: Callable[..., Any], call: Call, known: Sequence[Pattern]) -> Observed:
    """The first pattern that a call follows: one that is known, else one found from short runs.

    Raises LengthError with the line at which the last pattern was left.
    """
    refusal: LengthError | None = None
    for pattern in known:
        try:
            return _follow(model, call, pattern)
        except TooShortError:
            raise
        except LengthError as error:
            refusal = error
    for lengths in _candidates(call.length):
        if any(pattern.lengths == lengths for pattern in known):
            continue
        try:
            return _follow(model, call, probe(model, call, lengths))
        except TooShortError:
            raise
        except LengthError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _candidates(length: int) -> Iterator[tuple[int, ...]]:
    """Short lengths to look at: any three, or three that leave the same rest as ``length`` for a period."""
    yield from _SHORT
    for period in range(2, _LONGEST_PERIOD + 1):
        first = max(4 * period, 8)
        first += (length - first) % period
        yield first, first + period, first + 3 * period


def probe(model: Callable[..., Any], call: Call, lengths: Sequence[int]) -> Pattern:
    """The pattern of runs at short lengths. Raises LengthError if there is none."""
    palette: dict[Any, int] = {}
    traces = []
    for length in lengths:
        short, _ = call.resized(lambda value, dim, length=length: first_steps(value, dim, length))  # type: ignore[misc]
        trace = Trace(length, [], [], [])

        def note(colour: tuple[Any, ...], numbers: Numbers, trace: Trace = trace) -> None:
            trace.colours.append(palette.setdefault(colour, len(palette)))
            trace.numbers.append(numbers)
            trace.lines.append(user_line())

        sequences = [value for value in tensors_of((short.args, short.kwargs)) if id(value) in short.dims]
        versions = [value._version for value in sequences]
        with _looked_at(model, short, frozenset(), parameters=True) as state:
            _run(model, short, note, state)
        if versions != [value._version for value in sequences]:
            raise LengthError("The model changes its sequence in place. Give it a copy: model(x.clone()).")
        traces.append(trace)
    pattern = find_pattern(traces, palette)
    _refuse_attributes(pattern)
    return pattern


def _follow(model: Callable[..., Any], call: Call, pattern: Pattern) -> Observed:
    check = Check(pattern, call.length, user_line)
    if not check.possible:
        raise TooShortError(f"{call.length} steps are fewer than the first and last ones that differ from the others.")
    try:
        with _looked_at(model, call, frozenset(call.dims), parameters=False) as state:
            result = _run(model, call, check.see, state)
        check.finish()
    except Departure as departure:
        raise (LengthError if call.length > pattern.lengths[0] else TooShortError)(str(departure)) from None
    leaves, structure = tree_flatten(result)
    return Observed(pattern, check, structure, tuple(None if isinstance(v, torch.Tensor) else v for v in leaves))


class TooShortError(LengthError):
    """A sequence is so short that its first and last steps, which differ from the others, meet."""


def _run(model: Callable[..., Any], call: Call, sink: Sink, state: State) -> Any:
    recorder = Recorder(sink, call.names())
    with recording(recorder):
        result = model(*call.args, **call.kwargs)
        recorder.give("result", result)
        for name, value in state.changes():
            recorder.give(name, value)
    return result


@contextmanager
def _looked_at(
    model: Callable[..., Any], call: Call, untouched: frozenset[int], *, parameters: bool
) -> Iterator[State]:
    """Put back what the model changes; ``untouched`` are tensors that it is known not to change."""
    state = State.of(model, call.args, call.kwargs, parameters=parameters, untouched=untouched)
    try:
        with random_numbers_kept():
            yield state
        if state.changed_parameter():
            raise UnsupportedError(
                "reroll.compile: the model changes a parameter in place in its forward. Use "
                "torch.compile(backend='reroll') for it."
            )
    finally:
        state.restore()


def _refuse_attributes(pattern: Pattern) -> None:
    """Refuse models that leave something in an attribute that Dynamo would fill from a short trace."""
    names = {number: colour for colour, number in pattern.palette.items()}
    for stretch in pattern.stretches:
        for slot in stretch.slots:
            given = next((x for x in names[slot.colour] if isinstance(x, str) and x.startswith("gives ")), None)
            if given in (None, "gives result"):
                continue
            forms = (*slot.head, *slot.tail, slot.middle)
            moves = any(form.c[i] or i in form.free for form in forms for i, k in enumerate(slot.kinds) if k != "made")
            inputs = any(isinstance(x, tuple) and x[:1] == ("from outside",) and isinstance(x[1], str) for x in names[slot.colour])
            if moves or inputs:
                raise LengthError(
                    f"The model leaves in {str(given).removeprefix('gives ')} what depends on the number of steps (a "
                    "number, a list that grows, or its input). Return it instead, or use torch.compile(backend='reroll')."
                )
