"""Nested tuples, lists, dicts and dataclasses of arguments and results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

Place = tuple[Any, ...]


def places_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """All tensors in nested values, with where they are."""
    value = opened(value)
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
    """All that is not nested, in order."""
    value = opened(value)
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def structure_of(value: Any) -> Any:
    """Types and keys of nested values, with None for everything in them."""
    kind, value = type(value), opened(value)
    if isinstance(value, Mapping):
        return kind, tuple((key, structure_of(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(structure_of(item) for item in value)
    return None


def with_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with ``function`` of each of its leaves."""
    nested = isinstance(opened(value), Mapping | tuple | list)
    return mapped(lambda item: with_leaves(function, item), value) if nested else function(value)


def opened(value: Any) -> Any:
    """The fields of a dataclass as a dict; other values as they are."""
    return dict(vars(value)) if hasattr(value, "__dict__") and is_dataclass(value) else value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with another one for each item; itself where nothing changes."""
    inside = opened(value)
    if isinstance(inside, Mapping):
        items = {key: function(item) for key, item in inside.items()}
        same = all(items[key] is inside[key] for key in items)
        return value if same else like(value, items)
    if not isinstance(value, tuple | list):
        return value
    made = [function(item) for item in value]
    if all(new is old for new, old in zip(made, value, strict=True)):
        return value
    return like(value, made)


def like(value: Any, content: Any) -> Any:
    """A nested value of the type of another one."""
    if isinstance(value, tuple | list):
        kind: Any = type(value)
        return tuple.__new__(kind, content) if hasattr(value, "_fields") else kind(content)
    made = copy.copy(value)
    if isinstance(value, Mapping) and opened(value) is value:
        made.clear()
        made.update(content)
        return made
    put = setattr if isinstance(value, Mapping) else object.__setattr__  # a mapping keeps its items as its fields
    for name, item in content.items():
        put(made, name, item)
    return made
