"""Which events of a run its results, its state and its branches can depend on.

A number that changes in a way that is not known matters only where something reads what is made of it. An event is
*pure* if it is an operation of torch's own that makes a tensor and does nothing else; pure events that no live event
reads are dead. All else is live, if in doubt.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from reroll.capture.recorder.events import LITERALS, SIZE, markers
from reroll.graph.effects import draws

_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)
_STATISTICS = ("batch_norm", "instance_norm", "fused_moving_avg")
_SHOWS = (Tensor.__bool__,)


def live_events(colours: Sequence[int], numbers: Sequence[Any], names: Mapping[int, Any]) -> frozenset[int]:
    """The live ones of a run's events, by their number in it."""
    pure = {number: _is_pure(names[number]) for number in set(colours)}
    live = set[int]()
    for at in range(len(colours) - 1, -1, -1):
        if at in live or not pure[colours[at]]:
            live.add(at)
            live |= {at - distance for distance in _distances(names[colours[at]], numbers[at])}
    return frozenset(live)


def _is_pure(colour: tuple[Any, ...]) -> bool:
    """Whether an event of this colour makes tensors and does nothing else."""
    function = colour[0]
    if not isinstance(function, (types.BuiltinFunctionType, *_METHODS)) or function in _SHOWS:
        return False
    name = function.__name__
    named = {key for item in colour if isinstance(item, tuple) and item[:1] == ("keys",) for key in item[1:]}
    updates = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in named
    return not updates and not draws(name) and not any(part in name for part in _STATISTICS)


def _distances(colour: tuple[Any, ...], numbers: Sequence[Any]) -> Iterator[int]:
    """How many events ago the operands of an event were made."""
    at = 0
    for item in colour:
        if isinstance(item, tuple) and item and item[0] == "run":
            inner = [marker for key in item[1:] for marker in markers(key)]
            own, size = numbers[at:], len(inner)
            yield from _of_run(inner, own[:size], own[size : 2 * size], int(own[2 * size]))
            at += 2 * size + 1
        elif item == "made":
            yield int(numbers[at])
            at += 2
        elif isinstance(item, tuple) and item and item[0] == SIZE:
            at += item[1]
        elif item in LITERALS:
            at += 1


def _of_run(kinds: Sequence[str], first: Sequence[Any], slopes: Sequence[Any], count: int) -> Iterator[int]:
    """Those of the items of a list that differ evenly; of lists in them, any that the numbers may be."""
    for run in range(count):
        values = [a + b * run for a, b in zip(first, slopes, strict=True)]
        yield from (int(value) for kind, value in zip(kinds, values, strict=True) if kind not in (*LITERALS, SIZE))
