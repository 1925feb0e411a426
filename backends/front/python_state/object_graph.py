"""What an object leads to: what a walk reads of it, without what is named in functions and classes."""

from __future__ import annotations

import array
import functools
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from gc import get_referents
from typing import Any

import numpy as np
from torch import Tensor, nn

from reroll.backends.front.python_state.attributes import attributes, slots_of
from reroll.backends.front.python_state.code_ownership import (
    holds_attributes,
    is_installed,
    is_users_code,
    once_a_class,
)
from reroll.capture.recorder.identity import PLAIN, Same, content_of, is_a, text_of

CACHED = type(functools.lru_cache(lambda: None))
_POINTERS = (functools.partial, weakref.ref, ContextVar, defaultdict, CACHED)
CONTAINERS = (dict, list, set, deque, array.array, bytearray)
_SEQUENCES = (list, set, deque, tuple, frozenset)
PLAIN_ITEMS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})
WRAPPERS = (
    *(types.FunctionType, types.MethodType, staticmethod, classmethod, property, types.MappingProxyType, CACHED),
    *(functools.partial, weakref.ref, ContextVar),
)
_NAMES = (*PLAIN, weakref.ref, type, types.ModuleType, types.FunctionType, types.MethodType)
_READERS = ("__dict__", "__getattribute__")
_HOLDERS = (
    *(nn.Module, ChainMap, UserDict, UserList, UserString, functools.partialmethod, types.SimpleNamespace),
    *(threading.Event, np.poly1d, *np.polynomial.Polynomial.__bases__),
    threading.local,  # its attributes are those of this thread
)


def items_of(value: Any) -> Iterable[Any]:
    """What a container holds, of a dict keys with values: by its own kind, not by what a subclass makes of it."""
    if is_a(value, dict):
        return OrderedDict.items(value) if is_a(value, OrderedDict) else dict.items(value)
    found: Iterable[Any] = next((kind.__iter__(value) for kind in _SEQUENCES if is_a(value, kind)), value)
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which holds nothing else. A user's class that is made from one
    may have attributes, and methods that read more."""
    if type(value) in PLAIN:
        return True
    return is_a(value, PLAIN) and (is_a(value, Enum) or not is_users_code(type(value)))


def _keys(value: Any) -> Iterator[Any]:
    """The keys of a dict that may hold something; what is remembered of an object by a weak reference is not its, and
    what is remembered of functions and classes says nothing of these."""
    return (key for key in dict.keys(value) if type(key) is not str and not is_a(key, _NAMES))


def leads_to(value: Any) -> Iterable[Any]:
    """The values that an object holds."""
    if type(value) in PLAIN_ITEMS:
        return (*value.values(), *_keys(value)) if is_a(value, dict) else value
    found = [*pointed_to(value), *attributes_of(value).values()]
    if is_a(value, dict):
        return *found, *dict.values(value), *_keys(value)
    if is_a(value, _SEQUENCES):
        return *found, *items_of(value)
    if is_a(value, types.FunctionType):
        return *found, *variables(value), *defaults(value)
    if is_a(value, np.ndarray) and value.dtype.hasobject:
        return list(value.flat)
    return found or _wrapped(value)


def _wrapped(value: Any) -> Iterable[Any]:
    """What an object of Python's is made around, for good."""
    if is_a(value, types.MethodType):
        return value.__self__, value.__func__
    if is_bound_in_c(value):
        return (value.__self__,)
    if is_a(value, staticmethod | classmethod):
        return (value.__func__,)
    if is_a(value, property):
        return value.fget, value.fset, value.fdel
    return get_referents(value) if is_a(value, types.MappingProxyType) else ()


def is_bound_in_c(value: Any) -> bool:
    """Whether a value is a method of an object of Python's, such as ``[].append``; a module's functions are none."""
    bound = is_a(value, types.BuiltinMethodType | types.MethodWrapperType)
    return bound and value.__self__ is not None and not is_a(value.__self__, types.ModuleType | type)


def pointed_to(value: Any) -> tuple[Any, ...]:
    """What an object of Python's, that has no attributes of a user's, stands for."""
    if not is_a(value, _POINTERS):
        return ()
    if is_a(value, functools.partial):
        return value.func, value.args, value.keywords
    if is_a(value, weakref.ref):
        return (value(),)
    if is_a(value, CACHED):
        return value.__wrapped__, *kept_results(value)
    if is_a(value, defaultdict):
        return (value.default_factory,)
    with suppress(LookupError):  # not set, and without a default
        return (value.get(),)
    return (None,)


def kept_results(function: Any) -> list[Any]:
    """The lists, dicts and sets that ``functools.lru_cache`` keeps of a user's function, as the garbage collector is
    told of them."""
    wrapped = function.__wrapped__
    while is_a(wrapped, functools.partial | types.MethodType):
        wrapped = wrapped.func if is_a(wrapped, functools.partial) else wrapped.__func__
    if not is_a(wrapped, types.FunctionType | type) or is_installed(wrapped):
        return []
    told = [each for each in get_referents(function) if each is not vars(function)]
    values = [item for each in told if type(each) is dict for item in each.values()]
    links = [each for each in values if type(each).__name__ == "_lru_list_elem"]
    if not links:  # a cache without a bound, which holds results by themselves
        return [each for each in values if is_a(each, CONTAINERS)]
    linked = (each for link in links for each in get_referents(link))
    caches = [each for each in told if type(each) is dict and any(item is links[0] for item in each.values())]
    return [each for each in (*told, *linked) if is_a(each, CONTAINERS) and each is not caches[0]]


def attributes_of(value: Any) -> MutableMapping[str, Any]:
    """The attributes of an object that code of a user's may set; none of what is torch's or Python's."""
    return attributes(value) if has_attributes(value) else {}


def has_attributes(value: Any) -> bool:
    """Whether an object is a module or one of a user's class, a user's function that is not installed, or a tensor.

    Not so a thread of an installed library: what it notes of itself, such as when that of progress bars last woke up,
    changes whatever a model does. One of the user's own may have what a model reads.
    """
    if is_a(value, types.FunctionType):
        return is_users_code(value) and not is_installed(value)
    kind: Any = type(value)
    return _have_attributes(kind) and (not _reads_its_dict(kind) or _is_readable(value))


@once_a_class
def _reads_its_dict(kind: Any) -> bool:
    """Whether a class has Python code of its own run where ``__dict__`` is read."""
    own = [each for each in kind.__mro__ if is_users_code(each)]
    return any(is_a(vars(each).get(name), types.FunctionType | property) for each in own for name in _READERS)


def _is_readable(value: Any) -> bool:
    with suppress(Exception):  # whatever its code raises: it is known by its identity
        return type(vars(value)) is dict
    return False


@once_a_class
def _have_attributes(kind: Any) -> bool:
    if issubclass(kind, _HOLDERS):
        return True
    if issubclass(kind, type | types.ModuleType) or (issubclass(kind, threading.Thread) and is_installed(kind)):
        return False
    if issubclass(kind, Tensor | np.ndarray):
        of_array = issubclass(kind, np.ndarray) and holds_attributes(kind) and kind.__dictoffset__ != 0
        return of_array or kind in (Tensor, nn.Parameter, nn.Buffer)
    return holds_attributes(kind) and (kind.__dictoffset__ != 0 or bool(slots_of(kind)))


def written(value: Any) -> str | None:
    """A number or a text, or a tuple or frozen set of these, as a text; None for all else."""
    if is_plain(value):
        return text_of(value)
    if type(value) not in (tuple, frozenset):
        return None
    parts = [each for each in map(written, value) if each is not None]
    ordered = sorted(parts) if is_a(value, frozenset) else parts
    return f"{type(value).__name__}{ordered}" if len(parts) == len(value) else None


def methods_of(kind: type) -> tuple[tuple[str, Same], ...]:
    """The methods that a class of torch's has by itself."""
    return tuple((name, Same(value)) for name, value in vars(kind).items() if is_a(value, types.FunctionType))


def variables(function: types.FunctionType) -> Iterator[Any]:
    """What the closure of a function holds."""
    for cell in function.__closure__ or ():
        yield from content_of(cell)


def defaults(function: types.FunctionType) -> tuple[Any, ...]:
    """The defaults of all parameters that have one."""
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
