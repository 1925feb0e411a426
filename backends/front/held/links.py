"""What a walk reads of an object: what it leads to, and the names that lead there."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from reroll.capture.recorder.identity import PLAIN

Code: TypeAlias = types.FunctionType | type
"""What names values: a function its globals, a class its attributes."""
_NOT_OURS = ("torch", "numpy", "builtins", "reroll", "collections", "contextlib", "functools", "threading", "logging")


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
    if isinstance(value, types.FunctionType):
        return *variables(value), *defaults(value)
    return vars(value).values() if is_users(value) else ()


def names(code: Code) -> Iterator[tuple[str, Any]]:
    """The globals that a function of a user's or a library's names, or the attributes of such a class."""
    if isinstance(code, type):
        yield from (each for each in vars(code).items() if each[0][:2] != "__" or not isinstance(each[1], PLAIN))
    elif is_users_code(code):
        read = code.__globals__
        yield from ((name, read[name]) for name in global_names(code.__code__) if name in read)


def variables(function: types.FunctionType) -> Iterator[Any]:
    """What the closure of a function holds."""
    for cell in function.__closure__ or ():
        yield from content_of(cell)


def content_of(cell: types.CellType) -> tuple[Any, ...]:
    """What a variable of a closure holds, or nothing."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # an empty cell
        return ()


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
