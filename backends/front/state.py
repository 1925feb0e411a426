"""The Python state that a run of a model may change, kept and put back.

A model is run to look at it (``reroll.capture.recorder.events``), and must be afterwards as if it had not been. Its
state is what can be reached from it: attributes of modules and of other objects of the user's, lists, dicts and sets in
them, variables of closures, and the tensors in all of these.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from reroll.capture.recorder.identity import PLAIN
from reroll.errors import UnsupportedError
from reroll.graph.private import version_of

_LEAVES = (*PLAIN, type, types.ModuleType)
_NOT_OURS = ("torch", "numpy", "builtins", "reroll", "collections", "contextlib", "functools", "threading", "logging")


class Change(NamedTuple):
    """An attribute, variable or item that is another object than it was.

    ``owner`` is the place in ``State.owners`` of the mapping or list that holds it under ``key``; None for what cannot
    be assigned again: items that are gone or were added to a list, items of sets, variables.
    """

    name: str
    value: Any
    owner: int | None
    key: Any
    before: Any


@dataclass
class State:
    """What was reached from the roots, as it was.

    plain: functions of the user's by their code, and the numbers and texts among their defaults, the globals that they
    name, and the attributes of ``classes``.
    """

    objects: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int, Tensor | None]] = field(default_factory=list)
    arrays: list[tuple[Any, Any]] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)

    @classmethod
    def of(cls, *roots: Any, parameters: bool, untouched: frozenset[int] = frozenset(), values: bool = True) -> State:
        """Note all that can be reached, but for the objects whose identities are ``untouched``.

        parameters: note the values of parameters too, not only that they changed. values: note those of other tensors,
        of arrays, and what lists, dicts and sets hold; without them nothing is copied, and nothing can be put back.
        """
        state, seen, todo = cls(), set(untouched), list(roots)
        while todo:
            value = todo.pop()
            if id(value) not in seen and not isinstance(value, _LEAVES):
                seen.add(id(value))
                todo += state._note(value, parameters, values)
        return state

    def _note(self, value: Any, parameters: bool, values: bool) -> Iterator[Any]:
        """Note one object, and give what can be reached from it."""
        if isinstance(value, Tensor):
            kept = parameters if isinstance(value, nn.Parameter) else values
            self.tensors.append((value, version_of(value), _copy(value) if kept else None))
        elif isinstance(value, dict | list | set | deque):
            self.containers.append((value, _content(value) if values else value))
            yield from dict.values(value) if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset | functools.partial | types.MethodType | types.FunctionType):
            yield from self._note_fixed(value)
        elif isinstance(value, np.ndarray):
            self.arrays.append((value, value.copy() if values else value))
        elif hasattr(type(value), "__next__"):
            raise UnsupportedError(
                f"reroll.compile: the model keeps an iterator ({type(value).__name__}), whose state cannot be put back "
                "after a look at the model. Keep a number or a list instead."
            )
        elif _is_users(value):
            self.objects.append((value, dict(vars(value))))
            yield from vars(value).values()
            yield from self._note_class(type(value))

    def _note_fixed(self, value: Any) -> Iterator[Any]:
        """What can be reached from an object that does not change itself."""
        if isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._note_function(value)
        else:
            yield from value

    def _note_function(self, function: types.FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                self.cells.append((cell, cell.cell_contents))
            except ValueError:  # an empty cell
                continue
            yield cell.cell_contents
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from defaults
        self.plain.append((function.__code__, *(repr(value) for value in defaults if isinstance(value, PLAIN))))
        read = function.__globals__
        if not _is_code_of_users(read.get("__name__")):
            return
        for name in (each for each in _names(function.__code__) if each in read):
            value = read[name]
            if isinstance(value, PLAIN):
                self.plain.append((name, repr(value)))
            elif isinstance(value, nn.Module | types.FunctionType | list | dict) or _is_users(value):
                yield value

    def _note_class(self, kind: type) -> Iterator[Any]:
        """What an object's class holds: its methods, which read globals, and lists and dicts that all objects share."""
        for each in kind.__mro__:
            if each in self.classes or not _is_code_of_users(each.__module__):
                continue
            self.classes.add(each)
            for name, value in vars(each).items():
                if isinstance(value, types.FunctionType | list | dict | set):
                    yield value
                elif isinstance(value, PLAIN) and name[:2] != "__":
                    self.plain.append((name, repr(value)))

    def restore(self) -> None:
        """Put back what changed; all else is left alone, as another thread may be about to change it."""
        for value, attributes in self.objects:
            _refill(vars(value), attributes)
        for value, content in self.containers:
            _refill(value, content)
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                cell.cell_contents = content
        for array, values in self.arrays:
            if not _same_values(array, values):
                array[...] = values
        for tensor, version, kept in self.tensors:
            if kept is not None:
                _restore(tensor, version, kept)

    @property
    def owners(self) -> list[Any]:
        """The attributes of each object, and the dicts, lists and sets."""
        return [*(vars(value) for value, _ in self.objects), *(value for value, _ in self.containers)]

    def changes(self) -> Iterator[Change]:
        """What is another object than it was."""
        for number, (value, attributes) in enumerate(self.objects):
            yield from _changed(f"{number} {type(value).__name__}", attributes, vars(value), number)
        for number, (value, content) in enumerate(self.containers):
            now = value if isinstance(value, dict) else dict(enumerate(value))
            was = content if isinstance(content, dict) else dict(enumerate(content))
            fixed = isinstance(value, set) or (not isinstance(value, dict) and len(was) != len(now))
            yield from _changed(f"container {number}", was, now, None if fixed else len(self.objects) + number)
        for number, (array, values) in enumerate(self.arrays):
            if not _same_values(array, values):
                yield Change(f"array {number}", array.tolist(), None, None, values)
        for number, (cell, content) in enumerate(self.cells):
            if cell.cell_contents is not content:
                yield Change(f"variable {number}", cell.cell_contents, None, None, content)

    def changed_parameter(self) -> bool:
        """Whether a parameter was changed in place."""
        return any(version_of(t) != version for t, version, _ in self.tensors if isinstance(t, nn.Parameter))


def _copy(tensor: Tensor) -> Tensor:
    """A copy; with its history if that may be lost, as a state's is that the model cuts off."""
    if tensor.is_leaf or tensor._is_view():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.clone()


def _restore(tensor: Tensor, version: int, kept: Tensor) -> None:
    """Give a tensor the values that it had when it was copied, and the history, if it has another one."""
    with torch.no_grad():
        # Some kernels change running statistics without a new version, so values are compared too.
        if version_of(tensor) != version or not _equal(tensor, kept):
            tensor.detach().copy_(kept.detach())
        if tensor.requires_grad and not kept.requires_grad:
            tensor.detach_()
    if kept.grad_fn is not None and tensor.grad_fn is not kept.grad_fn.next_functions[0][0]:
        with torch.enable_grad():
            tensor.detach_().copy_(kept)


def _equal(tensor: Tensor, kept: Tensor) -> bool:
    """Whether two tensors have the same values, where NaN is one; sparse ones are known by their version alone."""
    return tensor.layout is not torch.strided or bool(((tensor == kept) | ((tensor != tensor) & (kept != kept))).all())


@functools.lru_cache(maxsize=1 << 14)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Global names that a function reads, itself or in functions that it defines."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _content(value: Any) -> Any:
    """A copy of a dict, list, set or deque; of a dict what it holds, and not what a subclass makes of that."""
    return dict(dict.items(value)) if isinstance(value, dict) else value.copy()


def _changed(name: str, was: dict[Any, Any], now: dict[Any, Any], owner: int | None) -> Iterator[Change]:
    for key in now:
        found = dict.__getitem__(now, key)
        if key not in was or was[key] is not found:
            yield Change(f"{name}.{key}", found, owner, key, was.get(key))
    for key in was.keys() - now.keys():
        yield Change(f"{name}.{key} is gone", None, None, key, was[key])


def _same_values(array: Any, values: Any) -> bool:
    return array is values or np.array_equal(array, values, equal_nan=array.dtype.kind in "fc")


def _refill(value: Any, content: Any) -> None:
    """Give a list, dict, set or deque the content that it had, if it has another one."""
    if isinstance(value, set):
        changed = value != content
    elif isinstance(value, dict):
        changed = [*_identities(value)] != [*_identities(content)]
    else:
        changed = [*map(id, value)] != [*map(id, content)]
    if changed and isinstance(value, list):
        value[:] = content
    elif changed:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


def _identities(mapping: dict[Any, Any]) -> Iterator[tuple[Any, int]]:
    return ((key, id(item)) for key, item in dict.items(mapping))


def _is_users(value: Any) -> bool:
    """Whether an object has attributes that its methods may change: a module, or an instance of a user's class."""
    if isinstance(value, nn.Module):
        return True
    return isinstance(getattr(value, "__dict__", None), dict) and _is_code_of_users(type(value).__module__)


def _is_code_of_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_OURS
