"""Nested tuples, lists and dicts of arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Place = tuple[Any, ...]


def places_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """All tensors in nested tuples, lists and dicts, with where they are."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from places_of(item, (*place, key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from places_of(item, (*place, index))


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [each for _, each in places_of(value, ())]


def leaves_of(value: Any) -> Iterator[Any]:
    """All that is no tuple, list or dict, in order."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def structure_of(value: Any) -> Any:
    """Types and keys of nested tuples, lists and dicts, with None for everything in them."""
    if isinstance(value, Mapping):
        return type(value), tuple((key, structure_of(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(structure_of(item) for item in value)
    return None


def with_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with ``function`` of each of its leaves."""
    nested = isinstance(value, Mapping | tuple | list)
    return mapped(lambda item: with_leaves(function, item), value) if nested else function(value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested tuple, list or dict with another value for each item; itself where nothing changes."""
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        same = all(items[key] is value[key] for key in items)
        return value if same else like(value, items)
    if not isinstance(value, tuple | list):
        return value
    made = [function(item) for item in value]
    if all(new is old for new, old in zip(made, value, strict=True)):
        return value
    return like(value, made)


def like(value: Any, content: Any) -> Any:
    """A tuple, list or dict of the type of another one."""
    return type(value)(*content) if hasattr(value, "_fields") else type(value)(content)
