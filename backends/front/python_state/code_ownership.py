"""Who wrote a function, class or module: the user, a library that is installed, or torch and Python."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")
Code: TypeAlias = types.FunctionType | type | types.ModuleType
"""What names values: a function those of its module, a class its attributes, a module its globals."""
_NOT_OURS = frozenset(
    {
        *("torch", "numpy", "builtins", "reroll", "collections", "contextlib", "functools", "threading", "logging"),
        *("abc", "ast", "copy", "dataclasses", "enum", "importlib", "inspect", "random", "re", "typing", "warnings"),
        "typing_extensions",
    }
)
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def once_a_class(function: Callable[[Any], R]) -> Callable[[Any], R]:
    """A function of a class that is asked once of each, which is not kept alive: a class may hold what is compiled."""
    known = weakref.WeakKeyDictionary[Any, R]()

    @functools.wraps(function)
    def found(kind: Any) -> R:
        if kind not in known:
            known[kind] = function(kind)
        return known[kind]

    return found


def is_users_code(code: Code) -> bool:
    """Whether a function, class or module is a user's or a library's, neither torch's nor Python's."""
    return _is_users(_module_of(code)) and not _is_pythons(_module_of(code))


def holds_attributes(kind: type) -> bool:
    """Whether attributes of objects of a class may be a user's settings; those of Python's own may, but for a few."""
    return _is_users(_module_of(kind))


def reads_settings(module: object) -> bool:
    """Whether code of a module of this name may read settings: a user's, a library's, or that of torch's modules."""
    name = _text(module)
    return f"{name}.".startswith("torch.nn.") or (bool(name) and _is_users(name) and not _is_pythons(name))


def is_installed(code: Code) -> bool:
    """Whether it belongs to Python or to an installed library."""
    if isinstance(code, types.FunctionType):
        return _is_installed(code.__code__.co_filename)
    return _is_installed(_file_of(_module_of(code)))


def _module_of(code: Code) -> str:
    """The name of its module; of classes made by Cython and the like it may be no text, and counts as none."""
    if isinstance(code, types.FunctionType):
        return _text(code.__globals__.get("__name__"))
    return _text(vars(code).get("__name__") if isinstance(code, types.ModuleType) else _of_class(code))


def _of_class(kind: type) -> Any:
    return type.__getattribute__(kind, "__module__")


def _text(name: Any) -> str:
    return name if isinstance(name, str) else ""


def _file_of(module: str) -> str:
    """Where a module was read from; in Python itself there is no file."""
    found = sys.modules.get(module)
    inside = _INSTALLED[0] if module in sys.builtin_module_names else ""
    return _text(vars(found).get("__file__") if isinstance(found, types.ModuleType) else None) or inside


@functools.lru_cache(maxsize=1 << 12)
def _is_users(module: str) -> bool:
    return module.partition(".")[0] not in _NOT_OURS


@functools.lru_cache(maxsize=1 << 12)
def _is_pythons(module: str) -> bool:
    """A user's file may have the name of one of Python's."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and _is_installed(_file_of(top) or _INSTALLED[0])


@functools.lru_cache(maxsize=1 << 12)
def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or "site-packages" in file
