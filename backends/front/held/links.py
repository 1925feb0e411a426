"""What a walk reads of an object: what it leads to, and the names that lead there."""

from __future__ import annotations

import functools
import sysconfig
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from reroll.capture.recorder.identity import PLAIN, content_of

Code: TypeAlias = types.FunctionType | type
"""What names values: a function its globals, a class its attributes."""
WRAPPERS = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)
_NOT_OURS = ("torch", "numpy", "builtins", "reroll", "collections", "contextlib", "functools", "threading", "logging")
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def leads_to(value: Any) -> Iterable[Any]:
    """The values that an object holds, without what is named in functions and classes."""
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, list | set | deque | tuple | frozenset):
        return value
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, types.FunctionType):
        return *variables(value), *defaults(value)
    return vars(value).values() if is_users(value) else ()


def names(code: Code) -> Iterator[tuple[str, Any]]:
    """The globals that a function of a user's or a library's names, or the attributes of such a class."""
    if isinstance(code, type):
        yield from (each for each in vars(code).items() if each[0][:2] != "__" or not isinstance(each[1], PLAIN))
        return
    for space, read in spaces(code):
        yield from ((name, space[name]) for name in read if name in space)


def spaces(function: types.FunctionType) -> list[tuple[Mapping[str, Any], Collection[str]]]:
    """Where a function's names may stand, with these: its globals, and the modules and classes that they name.

    None of torch's; and of functions of installed libraries their globals alone, of which there are enough. A method of
    a class may read all that the class has.
    """
    read, seen = global_names(function.__code__), set[int]()
    found = list[tuple[Mapping[str, Any], Collection[str]]]()
    if is_users_code(function):
        found.append((function.__globals__, read))
    if _is_installed(function.__code__.co_filename):
        return found
    for space, _ in found:  # grows
        for value in (space[name] for name in read if name in space):
            if id(value) not in seen and isinstance(value, type | types.ModuleType):
                seen.add(id(value))
                found += ((vars(each), _read_of(vars(each), read)) for each in _owners(value))
    return found


def _read_of(space: Mapping[str, Any], read: Collection[str]) -> Collection[str]:
    """The names that are read in a module or class: all of a class if one of its methods is among them."""
    return space.keys() if any(isinstance(space.get(name), classmethod) for name in read) else read


def written(value: Any) -> str | None:
    """A number or a text, or a tuple or frozen set of these, as a text; None for all else."""
    if isinstance(value, PLAIN):
        return repr(value)
    if not isinstance(value, tuple | frozenset):
        return None
    parts = [each for each in map(written, value) if each is not None]
    ordered = sorted(parts) if isinstance(value, frozenset) else parts
    return f"{type(value).__name__}{ordered}" if len(parts) == len(value) else None


def _owners(value: Any) -> list[Any]:
    """A module of a user's, or a class of a user's with those that it is made from."""
    if isinstance(value, types.ModuleType):
        return [value] if _is_users(value.__name__) else []
    return [each for each in value.__mro__ if is_users_code(each)]


def variables(function: types.FunctionType) -> Iterator[Any]:
    """What the closure of a function holds."""
    for cell in function.__closure__ or ():
        yield from content_of(cell)


def defaults(function: types.FunctionType) -> tuple[Any, ...]:
    """The defaults of all parameters that have one."""
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def is_users(value: Any) -> bool:
    """Whether an object has attributes that its methods may change: a module, or an instance of a user's class."""
    if isinstance(value, nn.Module):
        return True
    held = isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, Tensor | np.ndarray)
    return held and is_users_code(type(value))


def is_users_code(code: Code) -> bool:
    """Whether a function or class is a user's or a library's, neither torch's nor Python's."""
    return _is_users(code.__module__ if isinstance(code, type) else code.__globals__.get("__name__"))


@functools.lru_cache(maxsize=1 << 14)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Global names that a function reads, itself or in functions that it defines."""
    inner = (global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


@functools.lru_cache(maxsize=1 << 12)
def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_OURS


@functools.lru_cache(maxsize=1 << 12)
def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed library."""
    return file.startswith(_INSTALLED) or "site-packages" in file
