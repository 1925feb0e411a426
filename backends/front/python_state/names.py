"""Which names code reads, and what stands for them: globals of its module, of other modules, attributes of classes."""

from __future__ import annotations

import builtins
import dis
import functools
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from reroll.backends.front.python_state.code_ownership import Code, is_installed, is_users_code
from reroll.backends.front.python_state.object_graph import written
from reroll.capture.recorder.identity import global_names, is_a

MISSING = object()
_OF_PYTHON = frozenset({"__doc__", "__module__", "__qualname__", "__name__", "__file__", "__firstlineno__", "__dict__"})
_LOADED = (type, types.ModuleType, types.FunctionType)  # what importing puts into a module
_IN_TEXTS = frozenset({"eval", "exec"})
_OF_MODULES = frozenset({"import_module", "__import__", "modules"})
_BY_TEXT = _OF_MODULES | _IN_TEXTS | {"globals", "locals", "vars", "getmodule", "__globals__"}
"""What code may find its own globals by, when it does not load them."""


class Named(NamedTuple):
    """A value that stands for a name, in what ``owner`` names or holds."""

    owner: Code
    name: str
    value: Any


class Spaces:
    """Where names are looked up (``found``: by identity, with the names), as more code is reached.

    Of its own globals only those count that code loads, or may find by a text: an attribute is none of them.
    Functions of installed libraries are followed by their globals alone, of which there are enough. A function of the
    user's may read more: names in the modules that its globals lead to, torch's and Python's among them; and names in
    any module that is held by an object, which any of these functions may be given.
    Of what ran while a model was recorded more is known (``read_by``): it names no more than it may have read. So the
    modules that it names are looked into whoever wrote it, and classes too: any of it may be given one of them.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}
        self._foreign: set[int] = set()
        self._held: dict[int, types.ModuleType] = {}
        self._read: dict[str, None] = {}
        self._by_ran: dict[str, None] = {}
        self._of_classes: dict[type, None] = {}
        self._of_modules: dict[int, types.ModuleType] = {}

    def named_by(self, code: Code) -> Iterator[Named]:
        """What stands for the names of more code, but for what came before."""
        if isinstance(code, type):
            yield from (Named(code, *each) for each in vars(code).items() if _counts(*each))
        elif isinstance(code, types.ModuleType):
            self._held[id(code)] = code
            yield from self._new(code, vars(code), self._read)
        elif is_users_code(code):
            found = [*self._new(code, code.__globals__, global_names(code.__code__))]
            found += [] if is_installed(code) else self._in_modules(code)
            yield from (each for each in found if not _is_module(each.value))  # their names were looked up already
            if not is_installed(code):
                yield from self._in_object_modules(code)

    def read_by(self, ran: Iterable[types.FunctionType]) -> Iterator[Named]:
        """What stands for the names of functions that ran, but for what came before."""
        for function in ran:
            read = texts_and_names(function.__code__)
            found = [*self._new(function, function.__globals__, global_names(function.__code__))]
            found += self._in_modules(function)
            yield from (each for each in found if not _is_module(each.value))
            self._by_ran.update(dict.fromkeys(read))
            modules = self._modules_of(function, read)
            self._of_modules |= {id(each): each for each in modules if is_users_code(each)}
            for space in (function.__globals__, *map(vars, modules)):
                self._of_classes |= dict.fromkeys(each for name in read if _is_named(each := space.get(name)))

    def read_in(self, classes: Iterable[type]) -> Iterator[Named]:
        """What functions that ran may read in modules that others of them name, in these classes and in those that any
        names, and what is called there without a name."""
        for module in self._of_modules.values():
            found = self._new(module, vars(module), [name for name in self._by_ran if name in vars(module)])
            yield from (each for each in found if not _is_module(each.value))
        todo = list(dict.fromkeys((*self._of_classes, *classes)))
        for kind in todo:  # grows
            held = {name: value for each in reversed(kind.__mro__) for name, value in vars(each).items()}
            called = [name for name, value in held.items() if name[:2] == "__" and is_a(value, types.FunctionType)]
            names = [*(name for name in self._by_ran if name in held), *called]
            todo += [value for name in names if _is_named(value := held[name]) and value not in todo]
            for each in filter(is_users_code, kind.__mro__):
                yield from self._new(each, vars(each), names, number=id(each))

    def users(self) -> Iterator[tuple[Mapping[str, Any], Iterable[str]]]:
        """Those of these that are the user's or a library's."""
        return (each for number, each in self.found.items() if number not in self._foreign)

    def _in_modules(self, function: types.FunctionType) -> Iterator[Named]:
        read = texts_and_names(function.__code__)
        for module in self._modules_of(function, read):
            yield from self._new(module, vars(module), read)
        if _BY_TEXT & {*read}:
            yield from self._new(function, function.__globals__, read)

    def _modules_of(self, function: types.FunctionType, read: Iterable[str]) -> list[types.ModuleType]:
        """The modules that a function names, and those that it names in these."""
        modules = _modules(function, read)
        for module in modules:  # grows
            modules += (each for name in read if _is_module(each := vars(module).get(name)) and each not in modules)
        return modules

    def _in_object_modules(self, function: types.FunctionType) -> Iterator[Named]:
        new = [name for name in texts_and_names(function.__code__) if name not in self._read]
        self._read.update(dict.fromkeys(new))
        for module in self._held.values():
            yield from self._new(module, vars(module), new)

    def _new(
        self, owner: Code, space: Mapping[str, Any], names: Iterable[str], number: int | None = None
    ) -> Iterator[Named]:
        """The values of names that were not looked up there before. What torch and Python lack is not looked up.

        number: the identity of a class, as its attributes are a new mapping whenever these are asked for.
        """
        foreign = _is_module(owner) and not is_users_code(owner)
        number = id(space) if number is None else number
        if foreign or is_a(owner, type):
            self._foreign.add(number)
        known = self.found.setdefault(number, (space, {}))[1]
        for name in [each for each in names if each not in known and (not foreign or each in space)]:
            known[name] = None
            if name in space:
                yield Named(owner, name, space[name])


Flag = tuple[dict[str, Any], str, Any]
"""A global: the names of its module, its own, and what it stands for."""


class Assigned:
    """What the names of code stand for, as it is: to see what a run assigns there, and to put it back."""

    def __init__(self, spaces: Spaces, code: Iterable[Code]) -> None:
        self._classes = [(each, dict(vars(each))) for each in code if isinstance(each, type)]
        self._named = [(space, {name: space.get(name, MISSING) for name in read}) for space, read in spaces.users()]

    def flags(self) -> list[Flag]:
        """The globals that stand for another truth value, text or None than before."""
        changed = ((space, name) for space, before in self._named for name in _others(space, before))
        return [
            (space, name, space[name])
            for space, name in changed
            if type(space) is dict and type(space.get(name, MISSING)) in (bool, str, type(None))
        ]

    def names(self) -> list[str]:
        """The other names that stand for another value than before."""
        flags = {(id(space), name) for space, name, _ in self.flags()}
        held = ((space, each) for space, before in self._named for each in _others(space, before))
        others = (name for kind, before in self._classes for name in _others(vars(kind), before, new=True))
        return [*(name for space, name in held if (id(space), name) not in flags), *others]

    def restore(self) -> None:
        """Put back what changed."""
        for space, before in self._named:
            for name in _others(space, before):
                if before[name] is MISSING:
                    del space[name]  # type: ignore[attr-defined]
                else:
                    space[name] = before[name]  # type: ignore[index]
        for kind, before in self._classes:
            for name in _others(vars(kind), before, new=True):
                if name in before:
                    type.__setattr__(kind, name, before[name])
                else:
                    type.__delattr__(kind, name)


def _others(space: Mapping[str, Any], before: Mapping[str, Any], *, new: bool = False) -> Iterator[str]:
    """The names of other values than before; new: those that were not there, too. A module may load what it gives.

    Names such as ``__annotations__`` are left out: Python makes these when they are asked for.
    """
    names = [*before, *(space.keys() - before.keys())] if new else [*before]
    for name in (each for each in names if each[:2] != "__"):
        was, value = before.get(name, MISSING), space.get(name, MISSING)
        loaded = was is MISSING and is_a(value, _LOADED)
        if value is not was and not loaded and (written(was) is None or written(value) != written(was)):
            yield name


@functools.lru_cache(maxsize=1 << 12)
def _stored(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that a function assigns, itself or in functions that it defines."""
    instructions = (each for part in parts_of(code) for each in dis.get_instructions(part))
    return tuple(each.argval for each in instructions if each.opname == "STORE_GLOBAL")


def parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and that of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from parts_of(constant)


@functools.lru_cache(maxsize=1 << 12)
def texts_and_names(code: types.CodeType) -> tuple[str, ...]:
    """All names in a function, those of attributes too, with the texts that may be names: of ``getattr(config,
    "alpha")``, and within those of ``eval``."""
    texts = [*_texts(code.co_consts)]
    inner = (texts_and_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    if _IN_TEXTS & {*code.co_names}:
        texts += [word for text in texts for word in re.findall(r"[^\W\d]\w*", text)]
    if not _OF_MODULES & {*code.co_names}:
        texts = [each for each in texts if each.isidentifier()]
    return tuple(dict.fromkeys((*code.co_names, *texts, *(name for names in inner for name in names))))


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if is_a(value, str):
            yield value
        elif is_a(value, tuple | frozenset):
            yield from _texts(value)


def _modules(function: types.FunctionType, read: Iterable[str]) -> list[types.ModuleType]:
    """The modules that a function names, as globals, in imports of its own, or by texts; and Python's own names."""
    space = function.__globals__
    found = [builtins, *(value for name in read if _is_module(value := space.get(name)))]
    imported = {*_imports(function.__code__)}
    if _OF_MODULES & {*read}:
        imported |= {(0, name) for name in read}
    for level, name in imported:
        package = (space.get("__package__") or "").split(".")
        above = [*package[: len(package) - level + 1], name] if level else [name]
        found.append(sys.modules.get(".".join(filter(None, above)), builtins))
    return list({id(each): each for each in found}.values())


@functools.lru_cache(maxsize=1 << 12)
def _imports(code: types.CodeType) -> tuple[tuple[int, str], ...]:
    """How far above, and under which name, a function imports modules when it runs."""
    found, before = [], list[dis.Instruction]()
    for each in dis.get_instructions(code) if dis.opmap["IMPORT_NAME"] in code.co_code[::2] else ():
        if each.opname == "IMPORT_NAME":
            found.append((before[-2].argval, each.argval))
        before.append(each)
    inner = (_imports(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return *found, *(each for several in inner for each in several)


def _counts(name: str, value: Any) -> bool:
    return name not in _OF_PYTHON or written(value) is None


def _is_named(value: Any) -> TypeGuard[type]:
    """Whether a value is a class of a user's or a library's."""
    return is_a(value, type) and is_users_code(value)


def _is_module(value: Any) -> TypeGuard[types.ModuleType]:
    return is_a(value, types.ModuleType)
