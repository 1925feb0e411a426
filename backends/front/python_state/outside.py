"""What a model takes from where nothing can be put back: iterators that its code names, files, sockets, processes.

A look would take from there, too, and a record gives again what was taken once. So a look stops before it happens. Of
iterators others stand for the names. What C functions a model calls is known where they are noted (``Ran.noting``):
those that open or read files, list directories, speak, ask the system for random bytes, or use context variables. The
clock is none of them, as logging asks for it, nor is the working directory, which is compared at each call.
"""

from __future__ import annotations

import importlib
import io
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from reroll.errors import UnsupportedError
from reroll.graph.lines import line_of, user_line

_OF_SYSTEM = frozenset(
    {
        *("open", "read", "write", "stat", "lstat", "fstat", "listdir", "scandir", "access", "readlink"),
        *("urandom", "getrandom", "system", "fork", "forkpty", "posix_spawn", "posix_spawnp", "mkdir", "remove"),
        *("unlink", "rename", "replace", "rmdir", "symlink", "link", "truncate", "utime", "chmod", "startfile"),
    }
)
_OF_MODULES: Mapping[str, frozenset[str]] = {
    "io": frozenset({"open", "open_code"}),
    "posix": _OF_SYSTEM,
    "nt": _OF_SYSTEM,
    "builtins": frozenset({"input"}),
    "_posixsubprocess": frozenset({"fork_exec"}),
    "_winapi": frozenset({"CreateProcess"}),
    "_sqlite3": frozenset({"connect"}),
}
_OF_STREAMS = frozenset({"read", "read1", "readall", "readinto", "readline", "readlines", "write", "writelines"})
_OF_SOCKETS = frozenset(
    {"connect", "connect_ex", "accept", "recv", "recv_into", "recvfrom", "send", "sendall", "sendto"}
)
_OF_CONTEXTS = frozenset({"get", "set", "reset"})
_NAMES = frozenset[str]().union(_OF_STREAMS, _OF_SOCKETS, _OF_CONTEXTS, *_OF_MODULES.values())
_BY_THEMSELVES = frozenset({"importlib", "linecache", "warnings", "tokenize", "inspect", "traceback", "logging", "gc"})
"""Modules of Python's that read files which are none of the model's."""
_IMPORTING = vars(importlib)["_bootstrap"]._find_and_load.__code__  # which runs for what is not imported yet
_QUIET = frozenset({"torch", "reroll", "triton", "sympy"})


class TakenError(UnsupportedError):
    """The model takes something from outside."""


class FirstImportError(UnsupportedError):
    """The model imports a module for the first time. What that does is done once, so nothing of it may be put back:
    a look ends, and begins anew behind the import."""

    def __init__(self, module: str) -> None:
        super().__init__(f"reroll.compile: the model imports {module} for the first time.")
        self.module = module


class Lent:
    """Stands for an iterator, and refuses to be taken from. ``refused``: with what it did."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._kind = name, type(value).__name__
        self.refused: TakenError | None = None

    def __iter__(self) -> Lent:
        return self

    def __next__(self) -> NoReturn:
        self.refused = TakenError(
            f"reroll.compile: the model takes from an iterator, {self._name} (a {self._kind}), at {user_line()}. A run "
            "that looks at the model would take from it, too, and nothing could put that back. Take from it before "
            "the model is called, and pass a tensor of it (torch.tensor(next(...)))."
        )
        raise self.refused

    send = throw = __next__


Names = tuple[MutableMapping[str, Any] | type, str, Any]
"""Where a name stands, which, and the iterator that it stands for."""


@contextmanager
def lent(names: Iterable[Names]) -> Iterator[None]:
    """Inside, nothing can be taken from these iterators. Raises TakenError where somebody has tried."""
    standing = [(space, name, value, Lent(name, value)) for space, name, value in names]
    try:
        for space, name, _, each in standing:
            _put(space, name, each)
        yield
    finally:
        for space, name, value, each in standing:
            if (vars(space) if isinstance(space, type) else space).get(name) is each:
                _put(space, name, value)
    for *_, each in standing:
        if each.refused is not None:
            raise each.refused


def _put(space: MutableMapping[str, Any] | type, name: str, value: Any) -> None:
    if isinstance(space, type):
        type.__setattr__(space, name, value)
    else:
        space[name] = value


def is_iterator(value: Any) -> bool:
    """Whether it is one that shows no state: a file is none, and what has attributes is known by these."""
    kind = type(value)
    own = kind.__dictoffset__ == 0 and not isinstance(value, io.IOBase | Lent)
    return own and hasattr(kind, "__next__") and hasattr(kind, "__iter__")


class Outside:
    """Refuses calls of C functions that take something from outside, and imports of modules that were not ``tried``
    yet. ``refused``: with what it did."""

    def __init__(self, tried: Container[str]) -> None:
        self.refused: TakenError | FirstImportError | None = None
        self.tried = tried

    def see(self, frame: types.FrameType) -> None:
        """Raise FirstImportError where a frame begins that imports a module."""
        if frame.f_code is _IMPORTING and (name := frame.f_locals["name"]) not in self.tried:
            self.refused = FirstImportError(name)
            raise self.refused

    def meet(self, meet: Callable[..., None], code: types.CodeType, space: dict[str, Any]) -> None:
        """Tell of code that is about to run; a model may catch what that raises."""
        try:
            meet(code, space)
        except TakenError as error:
            self.refused = error
            raise

    def refuse(self, frame: types.FrameType, function: Any) -> None:
        """Raise TakenError where the model makes such a call."""
        if function.__name__ in _NAMES and _takes(function) and (caller := _caller(frame)):
            self.refused = TakenError(
                f"reroll.compile: the model reads or writes outside of Python ({function.__qualname__}), at "
                f"{line_of(caller)}, which a record of its operations does not do. Do that before the model is called, "
                "and pass a tensor of what comes of it, or keep that in an attribute of the model."
            )
            raise self.refused


def _takes(function: Any) -> bool:
    name, owner = function.__name__, function.__self__
    if name in _OF_STREAMS and isinstance(owner, io.IOBase):
        std = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        return not isinstance(owner, io.StringIO | io.BytesIO) and all(owner is not each for each in std)
    if name in _OF_SOCKETS and type(owner).__module__ in ("socket", "_socket"):
        return True
    if name in _OF_CONTEXTS and isinstance(owner, ContextVar):
        return True
    module = str(function.__module__ or "").replace("_io", "io")
    return name in _OF_MODULES.get(module, ())


def _caller(frame: types.FrameType | None) -> types.FrameType | None:
    """Where the model makes a call, by Python's libraries perhaps; None for what Python, torch or reroll call."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        root = name.partition(".")[0]
        if root in _BY_THEMSELVES or (root in _QUIET and name != "torch.serialization"):
            return None
        if root not in sys.stdlib_module_names and root != "torch":
            return frame
        frame = frame.f_back
    return None
