"""What a recorded graph holds for, in place of guards: a key of all that can be reached."""

from __future__ import annotations

import decimal
import gc
import os
import struct
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reroll.backends.front.python_state.attributes import slots_of
from reroll.backends.front.python_state.code_ownership import once_a_class
from reroll.backends.front.python_state.hidden import bytes_in
from reroll.backends.front.python_state.object_graph import CONTAINERS, WRAPPERS, is_plain, items_of
from reroll.backends.front.python_state.state import State
from reroll.backends.processes.wrappers import alone, in_parts
from reroll.capture.recorder.identity import PLAIN, Same, is_a, text_of
from reroll.errors import UnsupportedError
from reroll.graph.inplace import overlapping, whole_extent
from reroll.graph.private import any_autocast, autocast_dtypes, hooks_of_all_modules, set_methods, settings_of_torch

_LARGE, _SAMPLES = 1 << 20, 4096  # bytes from which on an array is a data set, and of how many places it is known by
_NOTED = (*WRAPPERS, np.ndarray, memoryview)
_READ = (*_NOTED, *CONTAINERS, Tensor, type, types.ModuleType, threading.local)
_POINTER = struct.calcsize("P")
_MORE = (type(...), torch.Size)


def plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which holds nothing else."""
    return is_plain(value) or type(value) in _MORE


def placed(word: str, state: State) -> dict[int, tuple[str, int]]:
    """A word for each object, container and tensor of a state, by its identity: where it stands there."""
    held = (*(each for each, *_ in state.objects), *(each for each, _ in state.containers))
    places = {id(value): (word, number) for number, value in enumerate(held)}
    return places | {id(value): (f"{word} tensor", number) for number, (value, *_) in enumerate(state.tensors)}


def numbered(word: str, state: State) -> dict[int, tuple[str, int]]:
    """A word for each function, array and the like of a state, by its identity: which of them it is in the walk."""
    return {
        id(value): (word, number) for number, value in enumerate(each for each in state.reached if is_a(each, _NOTED))
    }


class Described:
    """What can be reached from a model in words that are equal where it is the same: places, not identities."""

    def __init__(
        self, *places: Mapping[int, tuple[str, int]], noted: Sequence[Mapping[int, tuple[str, int]]] = ()
    ) -> None:
        self.places, self.noted = places, noted

    def __call__(self, value: Any) -> Any:
        """One value."""
        for places in self.places:
            if id(value) in places:
                return places[id(value)]
        if plain(value):
            return type(value), text_of(value)
        if is_a(value, tuple):
            return type(value), tuple(map(self, value))
        return Same(value)

    def contents(self, state: State) -> Any:
        """What objects and containers, closures and arrays of a state hold."""
        owners = [(type(value), self.items(attributes), self._made_from(value)) for value, attributes in state.objects]
        owners += [(type(value), self.items(content), _most(value)) for value, content in state.containers]
        cells = tuple(self(content) for _, content in state.cells)
        pointed = tuple(tuple(map(self, content)) for _, content in state.pointed)
        arrays = tuple(array_in_words(value) for value, _ in state.arrays)
        roots = tuple(self._root(value) for value in state.roots)
        return tuple(owners), cells, pointed, arrays, tuple(state.plain), roots

    def _made_from(self, value: Any) -> Any:
        """What an object is beside its attributes, by the class of Python's that its own is made from."""
        if is_a(value, PLAIN):
            return text_of(value)
        if is_a(value, tuple | frozenset):
            return tuple(map(self, items_of(value)))
        return Same(value) if _holds_more(type(value)) else None

    def _root(self, value: Any) -> Any:
        """What stands for a name: by what it holds, where that is noted, and which of those it is, not by whose."""
        if is_a(value, types.MethodType):
            return type(value), self(value.__self__), self._root(value.__func__)
        if is_a(value, _NOTED):
            return type(value), next((each[id(value)] for each in self.noted if id(value) in each), None)
        return type(value), tuple(map(self._root, value)) if is_a(value, tuple) else self(value)

    def items(self, content: Any) -> Any:
        """Those of a dict, list, set or deque, in their order."""
        if is_a(content, dict):
            return tuple((self(key), self(value)) for key, value in items_of(content))
        return tuple(map(self, items_of(content)))


def _most(value: Any) -> Any:
    """How many items a deque may have, where it is one: asked of the deque, not of what a subclass makes of that."""
    return vars(deque)["maxlen"].__get__(value) if is_a(value, deque) else None


@once_a_class
def _holds_more(kind: Any) -> bool:
    """Whether objects of a class hold more than attributes, and what a walk reads of containers, tensors and arrays:
    what is written in C, or in slots of Python's own classes."""
    if issubclass(kind, _READ):
        return False
    known = object.__basicsize__ + _POINTER * (kind.__dictoffset__ > 0) + _POINTER * (kind.__weakrefoffset__ > 0)
    return bool(kind.__itemsize__) or kind.__basicsize__ > known + _POINTER * len(slots_of(kind))


class Hashed:
    """A large value of which the hash is made once. Equal ones hold one value, once they were compared."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Hashed) or other._hash != self._hash:
            return False
        if other.value is not self.value:
            if other.value != self.value:
                return False
            self.value = other.value
        return True

    def __hash__(self) -> int:
        return self._hash


def array_in_words(value: Any) -> Any:
    """An array of numpy's by its values; a large one by where it is, and by some of its values. What a file in memory
    holds."""
    if not is_a(value, np.ndarray):
        return bytes_in(value)
    if value.nbytes <= _LARGE or value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
    some = flat[:: max(value.size // _SAMPLES, 1)].tobytes()
    return value.shape, value.dtype.str, value.__array_interface__["data"][0], value.strides, some


def tensors_in_words(values: Sequence[Tensor]) -> Any:
    """Tensors by all but their values."""
    groups = sharing(values)
    first = {number: values[group[0]].data_ptr() for group in groups for number in group}
    offsets = (value.data_ptr() - first[number] if number in first else 0 for number, value in enumerate(values))
    return groups, tuple(map(_tensor, values, offsets))


def sharing(values: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the tensors and arrays that share memory with each other. Raises UnsupportedError for a DTensor."""
    if not alone() and any(map(in_parts, values)):
        raise UnsupportedError(
            "reroll.compile: the model holds or is given a DTensor, whose parts lie in several processes. Give it "
            "whole tensors, or compile by reroll.compile only the parts of it that have these."
        )
    return overlapping([whole_extent(value) for value in values])


def _tensor(value: Tensor, offset: int) -> Any:
    """All but the values.

    offset: bytes from the first tensor in the same memory. Where that one begins does not count: batches that are views
    of one data set are alike.
    """
    if value.layout != torch.strided:
        return Same(value)
    layout = (tuple(value.shape), value.stride(), offset)
    return (*layout, type(value), value.dtype, value.device, value.requires_grad, value.is_leaf, value.is_inference())


def _decimals() -> str:
    return repr(decimal.getcontext())


def _errors_of_numpy() -> tuple[Any, ...]:
    return tuple(np.geterr().items())


ASKED: Mapping[int, Callable[[], Any]] = {
    **{id(each): each for each in (torch.initial_seed, os.getcwd, gc.isenabled, sys.getrecursionlimit)},
    **{id(each): each for each in (threading.get_ident, threading.get_native_id)},
    **{id(each): _decimals for each in (decimal.getcontext, decimal.localcontext, decimal.Decimal)},
    id(threading.current_thread): threading.get_ident,
    id(np.geterr): _errors_of_numpy,
}
"""Of functions that say how a process is set, and of what depends on that: what asks for it."""


def modes() -> Any:
    """The modes of torch that change what operations do, or that a model may ask for."""
    found = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any_autocast() and autocast_dtypes())
    hooks = tuple(map(Same, hooks_of_all_modules()))
    methods = tuple((name, Same(value)) for name, value in set_methods())
    return (*found, torch.get_default_dtype(), torch.get_default_device(), hooks, settings_of_torch(), methods)
