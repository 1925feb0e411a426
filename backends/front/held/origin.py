"""Who wrote a function, class or module: the user, a library that is installed, or torch and Python."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from typing import TypeAlias

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


def is_users_code(code: Code) -> bool:
    """Whether a function, class or module is a user's or a library's, neither torch's nor Python's."""
    return _is_users(_module_of(code)) and not _is_pythons(_module_of(code))


def holds_attributes(kind: type) -> bool:
    """Whether attributes of objects of a class may be a user's settings; those of Python's own may, but for a few."""
    return _is_users(kind.__module__)


def is_installed(code: Code) -> bool:
    """Whether it belongs to Python or to an installed library."""
    if isinstance(code, types.FunctionType):
        return _is_installed(code.__code__.co_filename)
    return _is_installed(_file_of(_module_of(code)))


def _module_of(code: Code) -> str | None:
    if isinstance(code, types.FunctionType):
        return code.__globals__.get("__name__")
    return code.__name__ if isinstance(code, types.ModuleType) else code.__module__


def _file_of(module: str | None) -> str:
    """Where a module was read from; in Python itself there is no file."""
    found = sys.modules.get(module or "")
    inside = _INSTALLED[0] if module in sys.builtin_module_names else ""
    return getattr(found, "__file__", None) or inside


@functools.lru_cache(maxsize=1 << 12)
def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_OURS


@functools.lru_cache(maxsize=1 << 12)
def _is_pythons(module: str | None) -> bool:
    return (module or "").partition(".")[0] in sys.stdlib_module_names


@functools.lru_cache(maxsize=1 << 12)
def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or "site-packages" in file
