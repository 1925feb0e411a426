"""The states of one model, call after call."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from reroll.backends.front.python_state.attributes import attributes
from reroll.backends.front.python_state.code_ownership import Code, is_users_code
from reroll.backends.front.python_state.keys import (
    ASKED,
    Described,
    Hashed,
    array_in_words,
    modes,
    numbered,
    placed,
    tensors_in_words,
)
from reroll.backends.front.python_state.names import MISSING
from reroll.backends.front.python_state.object_graph import items_of, leads_to, pointed_to
from reroll.backends.front.python_state.ran import Ran
from reroll.backends.front.python_state.state import State
from reroll.capture.recorder.identity import Same, content_of, is_a
from reroll.graph.private import modules_as_compiled

_SMALL, _SMALL_ARRAY = 1 << 10, 1 << 14  # bytes of constants; the values of arrays are compared
_OF_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")


class Reach:
    """Notes what can be reached from a model and its arguments, without copies.

    It has three parts: what the model holds, what its arguments hold besides, and what the code of both names. The
    first and the last are walked again only where something in them is another object than before.
    """

    def __init__(self) -> None:
        modules_as_compiled()
        self._own: _Own | None = None
        self._named: _Named | None = None
        self.ran = Ran()
        self._stayed = dict[int, weakref.ref[Any]]()

    def noted(self, model: Any, args: Any, kwargs: Any) -> tuple[State, Key]:
        """The state of a model, its positional and its keyword arguments, and its key.

        The key is equal for two states in which the same operations have the same operands at the same positions.
        Numbers and texts are told apart by value; tensors by all but their values; objects of torch's and others that
        are not looked into, by identity. The modes of torch that change what operations do belong to it too.
        """
        own, given, seen = self._model(model), State(parameters=False, values=False), set[int]()
        part = own.part()
        given.classes |= part.classes
        for root in (args, kwargs):
            given.walk([root], seen, own.found)
        both = part.joined(given)
        named = self._code(own, both, seen)
        self._stayed = {id(value): weakref.ref(value) for value in (*own.staying(part.tensors), *named.large)}
        state, places = both.joined(named.part), placed("given", given)
        noted = (own.noted, numbered("given", given), named.noted)
        words = Described(own.places, places, named.places, noted=noted)
        # The tuple and the dict of a call are new at every call, so they are known by what they hold.
        roots = words(model), tuple(map(words, args)), words.items(kwargs)
        tensors = tensors_in_words([value for value, *_ in state.tensors])
        asked = named.answers()
        return state, Key(roots, own.key, words.contents(given), named.described(words), tensors, modes(), asked)

    def _model(self, model: Any) -> _Own:
        if self._own is not None and self._own.holds(model):
            return self._own
        part, found = State(parameters=False, values=False), set[int]()
        part.walk([model], found)
        own = _Own(model, part, found)
        self._own = own if self._stay(own.staying(part.tensors)) else None
        return own

    def _code(self, own: _Own, both: State, seen: set[int]) -> _Named:
        if self._named is not None and self._named.holds(own, both, seen, self.ran):
            return self._named
        named = _Named(own, both, seen, self.ran)
        self._named = named if self._stay(named.large) else None
        return named

    def _stay(self, values: Iterable[Any]) -> bool:
        """Whether values were there at the call before, too. What is new at each call would be kept too long."""
        return all(self._stayed.get(id(value), lambda: None)() is value for value in values)


class Key(NamedTuple):
    """A state in words: which arguments there are, what the model holds, what its arguments hold besides, what code of
    both names, tensors, modes of torch, and what Python and torch say of the process."""

    roots: Any
    own: Any
    given: Any
    named: Any
    tensors: Any
    modes: Any
    asked: Any

    @property
    def readable(self) -> Any:
        """All that code of the model may read but the arguments of a call, and sizes."""
        return self.own, self.named, self.modes, self.asked


class _Own:
    """What a model holds, in words (``places``, ``key``); ``found`` are the identities of all in it.

    A tensor that a module holds may be another one at each call, such as a state: it is known weakly, by its number
    among all, and where the others are as they were, it takes the place of the one before.
    """

    def __init__(self, model: Any, part: State, found: set[int]) -> None:
        """By a walk that is over: it ``found`` what is in ``part``."""
        self.model, self.found = model, found
        self.places = placed("own", part)
        self.noted = numbered("own", part)
        self.key = Hashed(Described(self.places, noted=[self.noted]).contents(part))
        self.modules = [each for each in part.reached if is_a(each, nn.Module)]
        self.tensors = [weakref.ref(value) for value, *_ in part.tensors]
        self.identities = [id(value) for value, *_ in part.tensors]
        numbers = {identity: number for number, identity in enumerate(self.identities)}
        apart = [*_not_in_modules(part.reached), *(value for value, _ in part.objects)]
        self.fixed = {numbers[id(value)] for value in apart if is_a(value, Tensor)}
        self.with_attributes = {numbers[id(value)] for value, _ in part.objects if is_a(value, Tensor)}
        self.arrays = [value for value, _ in part.arrays if _is_large(value)]
        self._objects = [value for value, _ in part.objects]
        self._containers = [value for value, _ in part.containers]
        self._code, self._classes = part.code, part.classes
        part.bare = [each for each in part.bare if not is_a(each, Tensor)]
        self.watched = _Watched(part, [])
        before = self.watched.before
        self.spots = [(at, numbers[id(each)]) for at, each in enumerate(before) if is_a(each, Tensor)]
        for at, _ in self.spots:
            before[at] = Tensor

    def part(self) -> State:
        """What the model holds now, after ``holds``."""
        tensors: Any = [(each(), 0, None) for each in self.tensors]
        return State(
            parameters=False,
            values=False,
            objects=[(value, {}) for value in self._objects],
            containers=[(value, value) for value in self._containers],
            tensors=tensors,
            code=[*self._code],
            classes={*self._classes},
        )

    def staying(self, tensors: Sequence[tuple[Tensor, Any, Any]]) -> list[Any]:
        """What must be there at two calls: modules, and large values that anything else holds."""
        fixed = [value for value, *_ in map(tensors.__getitem__, self.fixed) if _is_large(value)]
        return [*self.modules, *fixed, *self.arrays]

    def holds(self, model: Any) -> bool:
        """Whether a walk would find the same, but for tensors that modules hold."""
        now, found = self.watched.now(), dict[int, Tensor]()
        if model is not self.model or len(now) != len(self.watched.before):
            return False
        for at, number in self.spots:
            value = now[at]
            if not is_a(value, Tensor) or found.setdefault(number, value) is not value:
                return False
            now[at] = Tensor
        return self.watched.is_like(now) and self._takes(found) and not any(map(_has_more, self._bare()))

    def _bare(self) -> Iterator[Any]:
        """The tensors without attributes."""
        return (each() for number, each in enumerate(self.tensors) if number not in self.with_attributes)

    def _takes(self, found: dict[int, Tensor]) -> bool:
        """Take tensors by their numbers, unless the walk were another one with them."""
        others = {number: value for number, value in found.items() if self.tensors[number]() is not value}
        if not others:
            return True
        gone, new = {self.identities[number] for number in others}, {id(value) for value in others.values()}
        same = self.found - gone
        alike = len(new) == len(others) and new.isdisjoint(same) and self.fixed.isdisjoint(others)
        if not alike:
            return False
        self.found = same | new
        words = {number: self.places.pop(self.identities[number]) for number in others}
        for number, value in others.items():
            self.identities[number], self.tensors[number] = id(value), weakref.ref(value)
            self.places[id(value)] = words[number]
        return True


def _not_in_modules(reached: Sequence[Any]) -> Iterator[Any]:
    """What anything holds but a module by itself: as an attribute, a parameter or a buffer."""
    modules = [each for each in reached if is_a(each, nn.Module)]
    own = {id(vars(each).get(name)) for each in modules for name in ("_parameters", "_buffers")}  # torch.jit has none
    for value in reached:
        if not is_a(value, nn.Module) and id(value) not in own:
            yield from leads_to(value)


class _Named:
    """What functions and classes name, and what can be reached from there.

    code: the functions and classes, from which the walk began. found: what the walk came to, by identity. met: what it
    read that belongs to the model's own part or to its arguments.
    """

    def __init__(self, own: _Own, both: State, seen: set[int], ran: Ran) -> None:
        """Walk from the code in both, a model's own part and its arguments, of which ``seen`` are the identities, and
        from what ``ran`` in records."""
        before = own.found | seen
        self.own, self.code, self.part = own, _read(both.code), both.named({*before}, ran.functions)
        self.ran = len(ran.functions)
        self.found = {id(value) for value in self.part.reached}
        self.places, self.noted = placed("named", self.part), numbered("named", self.part)
        self.watched = _Watched(self.part, [*both.code, *self.part.code])
        read = {id(value): value for value in self.watched.before}
        self.met = [read[each] for each in read.keys() & before]
        self.large = [*filter(_is_large, (*self.part.reached, *self.met))]
        self.asks = [ASKED[id(each)] for each in map(_callable_in, self.part.plain) if id(each) in ASKED]
        self._key: tuple[Any, Hashed] | None = None

    def holds(self, own: _Own, both: State, seen: set[int], ran: Ran) -> bool:
        """Whether a walk would find the same: everything that it would read is the same object as it was."""
        if len(ran.functions) != self.ran:
            return False
        apart = (own is self.own or own.found.isdisjoint(self.found)) and seen.isdisjoint(self.found)
        if not (apart and all(id(value) in own.found or id(value) in seen for value in self.met)):
            return False
        if not (_are(_read(both.code), self.code) and self.watched.is_like(self.watched.now())):
            return False
        self.own = own
        return True

    def answers(self) -> tuple[Any, ...]:
        """What the functions that code names say of the process."""
        return tuple(ask() for ask in self.asks)

    def described(self, words: Described) -> Hashed:
        """The part in words; they are other ones where what it ``met`` is at other places."""
        met = tuple(map(words, self.met))
        if self._key is None or self._key[0] != met:
            self._key = met, Hashed(words.contents(self.part))
        return self._key[1]


class _Watched:
    """All that a walk reads of what it came to (``links``), ``before`` and now; tuples and methods cannot change."""

    def __init__(self, part: State, code: Iterable[Code]) -> None:
        self.names = [(space, tuple(read)) for space, read in part.spaces.found.values()]
        self.functions = [*(each for each in part.reached if is_a(each, types.FunctionType)), *part.called]
        self.cells = [cell for cell, _ in part.cells]
        defaults = [each.__kwdefaults__ for each in self.functions if each.__kwdefaults__]
        containers = [value for value, _ in part.containers]
        self.objects = [value for value, _ in part.objects]
        self.of_dict, self.of_slots = _by_kind(self.objects)
        self.bare_of_dict, self.bare_of_slots = _by_kind(part.bare)  # thousands of functions, looked at in each call
        self.classes = [each for each in code if is_a(each, type)]
        self.classes += (each for each in part.classes if issubclass(each, nn.Module) and not is_users_code(each))
        dicts: list[dict[Any, Any]] = [*defaults, *(each for each in containers if is_a(each, dict))]
        self.dicts = [each for each in dicts if type(each) is dict]
        self.kinds_of_dicts = [each for each in dicts if type(each) is not dict]
        self.items = [each for each in containers if not is_a(each, dict)]
        self.pointed = [value for value, _ in part.pointed]
        self.arrays = [(value, array_in_words(value)) for value, _ in part.arrays]
        self.before = self.now()

    def is_like(self, now: Sequence[Any]) -> bool:
        """Whether it was the same ``before``, and arrays hold what they held."""
        return _are(now, self.before) and all(array_in_words(value) == before for value, before in self.arrays)

    def now(self) -> list[Any]:
        """It, as it is."""
        read = list[Any]()
        for space, found in self.names:
            read += map(space.get, found, repeat(MISSING))
        read += chain.from_iterable(map(_OF_FUNCTIONS, self.functions))
        read += chain.from_iterable(map(content_of, self.cells))
        dicts: Iterable[dict[Any, Any]] = chain(self.dicts, map(vars, self.of_dict))
        read += chain.from_iterable(chain.from_iterable(map(dict.items, dicts)))
        read += chain.from_iterable(chain.from_iterable(map(items_of, self.kinds_of_dicts)))
        for of_class in map(vars, self.classes):
            read += of_class
            read += of_class.values()
        for each in map(attributes, self.of_slots):
            read += [*chain.from_iterable(each.items())]
        for each in self.items:
            read.append(MISSING)  # what one list gives to the next is another list
            read += items_of(each)
        read += map(type, self.objects)
        read += chain.from_iterable(map(pointed_to, self.pointed))
        read += map(len, map(vars, self.bare_of_dict))
        read += map(len, map(attributes, self.bare_of_slots))
        return read


def _by_kind(objects: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Objects whose attributes are all in their dict, and the others."""
    plain = [type(attributes(each)) is dict for each in objects]
    others = [each for each, is_plain in zip(objects, plain, strict=True) if not is_plain]
    return [*compress(objects, plain)], others


def _callable_in(noted: Any) -> Any:
    """What can be called, of what a state notes of a name."""
    named = type(noted) is tuple and len(noted) == 2 and type(noted[1]) is Same
    return noted[1].value if named else None


def _is_large(value: Any) -> bool:
    """Whether a value is a tensor or an array, and no constant of a few bytes, which may be kept."""
    if is_a(value, np.ndarray):
        return bool(value.nbytes > _SMALL_ARRAY or value.dtype.hasobject)
    if not is_a(value, Tensor):
        return False
    strided = value.layout is torch.strided
    return value.grad_fn is not None or not strided or value.untyped_storage().nbytes() > _SMALL


def _has_more(tensor: Tensor) -> bool:
    """Whether a tensor has attributes of a user's."""
    return bool(vars(tensor)) and bool(attributes(tensor))


def _read(code: Sequence[Code]) -> list[Any]:
    """What says which names functions and classes read, and where."""
    said = ((each.__code__, each.__globals__) if isinstance(each, types.FunctionType) else (each,) for each in code)
    return [*chain.from_iterable(said)]


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two sequences are of the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))
