"""The states of one model, call after call."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reroll.backends.front.held.attributes import attributes
from reroll.backends.front.held.keys import Described, Hashed, array_in_words
from reroll.backends.front.held.links import pointed_to
from reroll.backends.front.held.names import MISSING
from reroll.backends.front.held.origin import Code
from reroll.backends.front.held.state import State
from reroll.capture.recorder.identity import content_of

_VALUES = (Tensor, np.ndarray)
_SMALL, _SMALL_ARRAY = 1 << 10, 1 << 14  # bytes of constants; the values of arrays are compared
_OF_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")


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
        """Whether there is no tensor and no array in it but constants of a few bytes."""
        values = [
            *(value for value, *_ in (*self.part.tensors, *self.part.arrays)),
            *(each for each in self.met if isinstance(each, _VALUES)),
        ]
        return all(map(_is_small, values))

    def holds(self, code: Sequence[Code], seen: set[int]) -> bool:
        """Whether a walk would find the same: everything that it would read is the same object as it was."""
        apart = seen.isdisjoint(self.found) and all(id(value) in seen for value in self.met)
        watched = self.watched
        return apart and _are(_read(code), self.code) and _are(watched.now(), watched.before) and watched.has_values()

    def described(self, words: Described) -> Hashed:
        """The part in words; they are other ones where what it ``met`` is at other places."""
        met = tuple(map(words, self.met))
        if self._key is None or self._key[0] != met:
            self._key = met, Hashed(words.held(self.part))
        return self._key[1]


class _Watched:
    """All that a walk reads of what it came to (``links``), ``before`` and now; tuples and methods cannot change."""

    def __init__(self, part: State) -> None:
        self.names = [(space, tuple(read)) for space, read in part.spaces.found.values()]
        self.functions = [each for each in part.reached if isinstance(each, types.FunctionType)]
        self.cells = [cell for cell, _ in part.cells]
        defaults = [each.__kwdefaults__ for each in self.functions if each.__kwdefaults__]
        containers = [value for value, _ in part.containers]
        self.objects = [value for value, _ in part.objects]
        self.of_dict = [each for each in self.objects if type(attributes(each)) is dict]
        self.of_slots = [each for each in self.objects if type(attributes(each)) is not dict]
        self.classes = [each for each in part.code if isinstance(each, type)]
        self.dicts: list[dict[Any, Any]] = [*defaults, *(each for each in containers if isinstance(each, dict))]
        self.items = [each for each in containers if not isinstance(each, dict)]
        self.pointed = [value for value, _ in part.pointed]
        self.bare = part.bare
        self.modules = [each for each in self.objects if isinstance(each, nn.Module)]
        self.arrays = [(value, array_in_words(value)) for value, _ in part.arrays]
        self.before = self.now()

    def has_values(self) -> bool:
        """Whether the arrays hold what they held."""
        return all(array_in_words(value) == before for value, before in self.arrays)

    def now(self) -> list[Any]:
        """It, as it is."""
        read = list[Any]()
        for space, found in self.names:
            read += map(space.get, found, repeat(MISSING))
        read += chain.from_iterable(map(_OF_FUNCTIONS, self.functions))
        read += chain.from_iterable(map(content_of, self.cells))
        for held in self.dicts:
            read += held.keys() if type(held) is OrderedDict else dict.keys(held)  # whose order is its own
            read += dict.values(held)
        for held_by in map(vars, [*self.of_dict, *self.classes]):
            read += held_by
            read += held_by.values()
        for each in map(attributes, self.of_slots):
            read += [*chain.from_iterable(each.items())]
        read += chain.from_iterable(self.items)
        read += map(type, self.objects)
        read += chain.from_iterable(map(pointed_to, self.pointed))
        read += map(len, map(attributes, self.bare))
        read += (type(each).forward for each in self.modules)
        return read


def _is_small(value: Any) -> bool:
    """Whether a value is a constant of a few bytes, which may be kept."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _SMALL_ARRAY and not value.dtype.hasobject
    if not isinstance(value, Tensor) or value.grad_fn is not None or value.layout is not torch.strided:
        return False
    return value.untyped_storage().nbytes() <= _SMALL


def _read(code: Sequence[Code]) -> list[Any]:
    """What says which names functions and classes read, and where."""
    said = ((each.__code__, each.__globals__) if isinstance(each, types.FunctionType) else (each,) for each in code)
    return [*chain.from_iterable(said)]


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two sequences are of the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))
