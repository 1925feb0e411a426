"""The states of one model, call after call."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import numpy as np
from torch import Tensor

from reroll.backends.front.held.keys import Described, Hashed
from reroll.backends.front.held.links import Code, spaces, written
from reroll.backends.front.held.state import State
from reroll.capture.recorder.identity import content_of

_MISSING = object()
_VALUES = (Tensor, np.ndarray)
_OF_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")
_OF_PARTIAL = attrgetter("func", "args", "keywords")


class Reach:
    """Notes what can be reached from a model and its arguments, without copies.

    What the model's code names is walked again only where something in it is another object than before.
    """

    def __init__(self) -> None:
        self._known: _Named | None = None

    def noted(self, model: Any, args: Any, kwargs: Any) -> tuple[State, Any]:
        """The state of a model, its positional and its keyword arguments, and its key."""
        roots = model, args, kwargs
        own, seen = State(parameters=False, values=False), set[int]()
        own.walk(roots, seen)
        known = self._known
        if known is None or not known.holds(own.code, seen):
            known = _Named(own, seen)
            self._known = known if known.may_be_kept else None
        words = Described(own, known.part)
        return own.joined(known.part), words.key(roots, known.described(words))


class Names:
    """What functions and classes name, in modules and classes, as it is: to see what a run assigns there."""

    def __init__(self, code: Sequence[Code]) -> None:
        self._classes = [(space, dict(space)) for space in (vars(each) for each in code if isinstance(each, type))]
        self._named = [(space, {name: space.get(name, _MISSING) for name in read}) for space, read in _names(code)]

    def assigned(self) -> list[str]:
        """The names that stand for another value than before."""
        held = (each for space, before in (*self._named, *self._classes) for each in _others(space, before))
        return [*held, *(name for space, before in self._classes for name in space.keys() - before.keys())]


def _others(space: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    for name, was in before.items():
        value = space.get(name, _MISSING)
        if value is not was and (written(was) is None or written(value) != written(was)):
            yield name


class _Named:
    """What functions and classes name, and what can be reached from there.

    code: the functions and classes, from which the walk began. found: what the walk came to, by identity. met: what it
    read that belongs to the model's own part.
    """

    def __init__(self, own: State, seen: set[int]) -> None:
        """Walk from the functions and classes of a model's own part; ``seen`` are the identities of all in that."""
        before = frozenset(seen)
        self.code, self.part = _read(own.code), own.named(seen)
        self.found = {id(value) for value in self.part.reached}
        self.watched = _Watched(self.part)
        self.part.code.clear()  # functions of the model's own part, whose variables may be tensors
        read = {id(value): value for value in self.watched.before}
        self.met = [read[each] for each in read.keys() & before]
        self._key: tuple[Any, Hashed] | None = None

    @property
    def may_be_kept(self) -> bool:
        """Whether there is no tensor or array in it, whose values would live from call to call, and count."""
        return not (self.part.tensors or self.part.arrays or any(isinstance(each, _VALUES) for each in self.met))

    def holds(self, code: Sequence[Code], seen: set[int]) -> bool:
        """Whether a walk would find the same: everything that it would read is the same object as it was."""
        apart = seen.isdisjoint(self.found) and all(id(value) in seen for value in self.met)
        return apart and _are(_read(code), self.code) and _are(self.watched.now(), self.watched.before)

    def described(self, words: Described) -> Hashed:
        """The part in words; they are other ones where what it ``met`` is at other places."""
        met = tuple(map(words, self.met))
        if self._key is None or self._key[0] != met:
            self._key = met, Hashed(words.held(self.part))
        return self._key[1]


class _Watched:
    """All that a walk reads of what it came to (``links``), ``before`` and now; tuples and methods cannot change."""

    def __init__(self, part: State) -> None:
        self.names = _names(part.code)
        self.functions = [each for each in part.reached if isinstance(each, types.FunctionType)]
        self.cells = [cell for cell, _ in part.cells]
        defaults = [each.__kwdefaults__ for each in self.functions if each.__kwdefaults__]
        containers = [value for value, _ in part.containers]
        self.objects = [value for value, _ in part.objects]
        self.classes = [each for each in part.code if isinstance(each, type)]
        self.dicts: list[dict[Any, Any]] = [*defaults, *(each for each in containers if isinstance(each, dict))]
        self.items = [each for each in containers if not isinstance(each, dict)]
        self.partial = [each for each in part.reached if isinstance(each, functools.partial)]
        self.before = self.now()

    def now(self) -> list[Any]:
        """It, as it is."""
        read = list[Any]()
        for space, found in self.names:
            read += map(space.get, found, repeat(_MISSING))
        read += chain.from_iterable(map(_OF_FUNCTIONS, self.functions))
        read += chain.from_iterable(map(content_of, self.cells))
        dicts: list[dict[Any, Any]] = [*self.dicts, *(each.__dict__ for each in self.objects)]
        for held in dicts:
            read += held.keys() if type(held) is OrderedDict else dict.keys(held)  # whose order is its own
            read += dict.values(held)
        for attributes in map(vars, self.classes):
            read += attributes
            read += attributes.values()
        read += chain.from_iterable(self.items)
        read += map(type, self.objects)
        read += chain.from_iterable(map(_OF_PARTIAL, self.partial))
        return read


def _names(code: Sequence[Code]) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """The names that functions read, by where these stand."""
    found: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}
    for each in (each for each in code if isinstance(each, types.FunctionType)):
        for space, read in spaces(each):
            found.setdefault(id(space), (space, {}))[1].update(dict.fromkeys(read))
    return [(space, tuple(named)) for space, named in found.values()]


def _read(code: Sequence[Code]) -> list[Any]:
    """What says which names functions and classes read, and where."""
    said = ((each,) if isinstance(each, type) else (each.__code__, each.__globals__) for each in code)
    return [*chain.from_iterable(said)]


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two sequences are of the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))
