"""What a model returns at the full length, from what Dynamo's bytecode returned for a few steps.

Values of single steps that the model returns in lists stand there as ``Row``: row k of run j. A stretch of a list whose
items have rows 0, 1, 2, ... of a run becomes one item for every value of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from reroll.backends.anylength import Row, Running
from reroll.errors import LengthError


def outputs(returned: Any, running: Running) -> Any:
    """The model's result. Raises LengthError where it has a structure that cannot be followed."""
    assert running.observed is not None
    grown = _grown(returned, running) if running.runs else returned
    leaves, structure = tree_flatten(grown)
    if structure != running.observed.structure or any(isinstance(leaf, Row) for leaf in leaves):
        raise LengthError(
            f"What the model returns at {running.call.length} steps does not have the structure that a short trace "
            "promises. Return tensors, or lists of one value a step, or use torch.compile(backend='reroll')."
        )
    found = [_leaf(leaf, seen, running) for leaf, seen in zip(leaves, running.observed.leaves, strict=True)]
    if all(new is old for new, old in zip(found, tree_leaves(returned), strict=False)) and grown is returned:
        return returned
    return tree_unflatten(found, structure)


def _leaf(leaf: Any, seen: Any, running: Running) -> Any:
    """A tensor of the program's, the sequence for a token, or a number of the model's own run at this length."""
    if isinstance(leaf, torch.Tensor):
        return running.sequences.get(id(leaf), leaf)
    return seen if isinstance(leaf, int | float | bool | str) and type(seen) is type(leaf) else leaf


def _grown(value: Any, running: Running) -> Any:
    """Lists with their stretches of rows at the full length."""
    if isinstance(value, Mapping):
        return type(value)({key: _grown(item, running) for key, item in value.items()})  # type: ignore[call-arg]
    if not isinstance(value, list | tuple):
        return value
    items = list(_items(value, running))
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _items(values: Sequence[Any], running: Running) -> Iterator[Any]:
    at = 0
    while at < len(values):
        rows = _rows(values[at])
        stop = at + 1
        while rows and stop < len(values) and _shape(values[stop]) == _shape(values[at]) and _follows(values, at, stop):
            stop += 1
        if rows and stop > at + 1:
            yield from _stretch(values[at], values[stop - 1], running)
        else:
            yield _grown(values[at], running)
        at = stop


def _rows(value: Any) -> list[Row]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Row)]


def _shape(value: Any) -> Any:
    """The structure of an item with its rows' runs, and all else that must be equal along a stretch."""
    leaves, structure = tree_flatten(value)
    return structure, [leaf.run if isinstance(leaf, Row) else id(leaf) for leaf in leaves]


def _follows(values: Sequence[Any], first: int, at: int) -> bool:
    """Whether the rows of an item are one further, or one back, of those of the item before, as along the stretch."""
    steps = {b.index - a.index for a, b in zip(_rows(values[at - 1]), _rows(values[at]), strict=True)}
    start = {b.index - a.index for a, b in zip(_rows(values[first]), _rows(values[first + 1]), strict=True)}
    return len(steps) == 1 and steps == start and steps <= {1, -1}


def _stretch(first: Any, last: Any, running: Running) -> Iterator[Any]:
    """One item for every value of the runs that a stretch goes through."""
    forward = _rows(first)[0].index < _rows(last)[0].index
    runs = {row.run for row in _rows(first)}
    count = min(len(running.runs[run]) for run in runs)
    for at in range(count):
        index = at if forward else count - 1 - at
        yield _mapped(first, lambda row, index=index: running.runs[row.run][index])  # type: ignore[misc]


def _mapped(value: Any, function: Callable[[Row], Any]) -> Any:
    leaves, structure = tree_flatten(value)
    return tree_unflatten([function(leaf) if isinstance(leaf, Row) else leaf for leaf in leaves], structure)
