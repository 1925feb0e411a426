"""The Python state that a run of a model may change, kept and put back.

A model is run to look at it (``reroll.capture.recorder.events``), and must be afterwards as if it had not been. Its
state is what can be reached from it: attributes of modules and of other objects of the user's, lists, dicts and sets in
them, variables of closures, and the tensors in all of these.
"""

from __future__ import annotations

import array
import copy
import io
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from reroll.backends.front.python_state.attributes import attributes
from reroll.backends.front.python_state.code_ownership import Code, is_installed, is_users_code
from reroll.backends.front.python_state.hidden import BY_LINES, FILES, Hidden, hidden_in, hides_state, holds_bytes
from reroll.backends.front.python_state.names import Assigned, Named, Spaces
from reroll.backends.front.python_state.object_graph import (
    CACHED,
    CONTAINERS,
    PLAIN_ITEMS,
    WRAPPERS,
    attributes_of,
    defaults,
    has_attributes,
    is_bound_in_c,
    is_plain,
    items_of,
    leads_to,
    methods_of,
    pointed_to,
    written,
)
from reroll.backends.front.python_state.outside import Names, TakenError, is_iterator
from reroll.capture.recorder.identity import Same, content_of, is_a
from reroll.errors import UnsupportedError
from reroll.graph.private import version_of

_FOLLOWED = (*WRAPPERS, *CONTAINERS, nn.Module, tuple, np.ndarray, memoryview)
_BARE = (Tensor, types.FunctionType)  # most have no attributes


class Absent(Enum):
    """What stands before a change for what was not there."""

    ABSENT = "nothing"


class Change(NamedTuple):
    """An attribute, variable or item that is another object than it was, or than ``Absent.ABSENT``.

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

    plain: functions of the user's by their code, and the numbers, texts and callables among their defaults, the globals
    that they name, and the attributes of classes. roots: what else stands for these, from which the walk goes on, or of
    which nothing is known but which object it is. pointed: weak references, context variables and the like, with what
    they stand for. bare: tensors and functions without attributes. called: functions of torch's and Python's, named by
    code. hidden: objects whose state is in no attribute.
    code: the functions and classes that were reached, which name globals and hold attributes, and modules that objects
    hold; spaces: where their names stand. assigned: what stood there, if values are noted. by_ran: whether
    what is walked is named by code that ran, and perhaps by nothing of the user's. reached: everything that may
    lead further.
    """

    parameters: bool
    values: bool
    objects: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int, Tensor | None]] = field(default_factory=list)
    arrays: list[tuple[Any, Any]] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)
    roots: list[Any] = field(default_factory=list)
    pointed: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    bare: list[Any] = field(default_factory=list)
    called: list[types.FunctionType] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    code: list[Code] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)
    iterators: list[Names] = field(default_factory=list)
    spaces: Spaces = field(default_factory=Spaces)
    assigned: Assigned | None = None
    by_ran: bool = False
    reached: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        *roots: Any,
        parameters: bool,
        values: bool = True,
        ran: Iterable[types.FunctionType] = (),
    ) -> State:
        """Note all that can be reached.

        parameters: note the values of parameters too, not only that they changed. values: note those of other tensors,
        of arrays, what lists, dicts and sets hold, and what stands for names; without them nothing is copied, and
        nothing can be put back. ran: functions of which is known that they ran.
        """
        own, seen = cls(parameters, values), set[int]()
        for root in roots:  # one after the other, as ``Reach`` walks them
            own.walk([root], seen)
        state = own.joined(own.named(seen, ran))
        state.assigned = Assigned(state.spaces, state.code) if values else None
        return state

    def walk(self, roots: Iterable[Any], seen: set[int], before: Set[int] = frozenset()) -> None:
        """Note what can be reached from the roots, but for what was ``seen`` and what functions and classes name.

        before: identities of what was seen by another walk.
        """
        todo = list(roots)
        while todo:
            value = todo.pop()
            if not is_plain(value) and id(value) not in seen and id(value) not in before:
                seen.add(id(value))
                self.reached.append(value)
                todo += self._note(value)

    def named(self, seen: set[int], ran: Iterable[types.FunctionType] = ()) -> State:
        """What the functions and classes of this state name, and what can be reached from there, theirs too.

        ran: functions of which is known that they ran. What they name counts too, but not what that names in turn.
        """
        part = State(self.parameters, self.values, classes={*self.classes})
        for code in chain(self.code, part.code):  # grows
            part.walk(part._note_names(part.spaces.named_by(code)), seen)
        followed, part.by_ran = len(part.code), True
        part.walk(part._note_names(part.spaces.read_by(ran)), seen)
        more = [each for each in part.code[followed:] if isinstance(each, type)]
        part.walk(part._note_names(part.spaces.read_in(more)), seen)
        return part

    def joined(self, part: State) -> State:
        """What both states hold, this one's first."""
        held = ("objects", "containers", "cells", "tensors", "arrays", "plain", "roots")
        names = (*held, "pointed", "bare", "called", "hidden", "code", "iterators")
        both: dict[str, Any] = {name: [*getattr(self, name), *getattr(part, name)] for name in names}
        return State(self.parameters, self.values, **both, classes=self.classes | part.classes, spaces=part.spaces)

    def _note(self, value: Any) -> Iterable[Any]:
        """Note one object, and give what it leads to."""
        if is_a(value, Tensor):
            if is_lazy(value):
                raise UnsupportedError(
                    f"reroll: the model holds an {type(value).__name__}, of a lazy module that was not called yet. "
                    "Call the plain model once before, as torch asks for: with torch.no_grad(): model(x)."
                )
            kept = self.parameters if isinstance(value, nn.Parameter) else self.values
            self.tensors.append((value, version_of(value), _copy(value) if kept else None))
        elif is_a(value, CONTAINERS):
            self.containers.append((value, _content(value) if self.values else value))
        elif is_a(value, types.FunctionType):
            self._note_function(value)
        elif is_a(value, type | types.ModuleType):
            self._note_space(value)
        elif is_a(value, np.ndarray):
            self.arrays.append((value, value.copy() if self.values else value))
        elif is_a(value, memoryview):
            self._note(np.asarray(value))
        elif self.values and (found := hidden_in(value)):
            if found.before is BY_LINES:
                raise TakenError(
                    "reroll.compile: the model may read a line of a file that is read by lines already, which cannot "
                    "be put back after a look at the model. Read it outside of the forward."
                )
            self.hidden.append(found)
        elif not self.values and holds_bytes(value):
            self.arrays.append((value, value))
        elif any("__next__" in vars(kind) for kind in type(value).__mro__) and not is_a(value, io.IOBase):
            if self.by_ran:
                return ()  # a library's, such as one that counts what was made: known by which object it is
            raise TakenError(
                f"reroll.compile: the model keeps an iterator ({type(value).__name__}), whose state cannot be put back "
                "after a look at the model. Keep a number or a list instead."
            )
        self._note_attributes(value)
        further = leads_to(value)
        if is_a(value, type | types.ModuleType) or not is_installed(type(value)):
            return further
        return [each for each in further if not is_a(each, FILES)]  # which threads of a library's may write meanwhile

    def _note_attributes(self, value: Any) -> None:
        if type(value) in PLAIN_ITEMS:
            return
        if pointed := pointed_to(value):
            self.pointed.append((value, pointed))
        if not has_attributes(value):
            if is_a(value, tuple | list | dict | set) and is_users_code(type(value)):
                self._note_class(type(value))
            return
        held = attributes(value)
        if is_a(value, _BARE) and not held:
            self.bare.append(value)
            return
        self.objects.append((value, dict(held)))
        self._note_class(type(value))

    def _note_function(self, function: types.FunctionType) -> None:
        self.cells += ((cell, each) for cell in function.__closure__ or () for each in content_of(cell))
        self.plain.append((function.__code__, *map(written, defaults(function))))
        self.roots += (each for each in defaults(function) if written(each) is None)
        self.code.append(function)

    def _note_space(self, value: type | types.ModuleType) -> None:
        """Note a module or class that an object holds."""
        if isinstance(value, types.ModuleType):
            self.code.append(value)
            self._note_class(type(value))
        elif is_users_code(value):
            self._note_class(value)

    def _note_class(self, kind: type) -> None:
        new = [each for each in kind.__mro__ if each not in self.classes]
        self.classes.update(new)
        for each in new:
            if is_users_code(each):
                self.code.append(each)
            elif issubclass(each, nn.Module):
                self.plain.append(methods_of(each))
        if new and not is_installed(type(kind)):
            self._note_class(type(kind))

    def _note_names(self, found: Iterable[Named]) -> Iterator[Any]:
        """Note the numbers, texts and callables that stand for names, and give what else leads further."""
        for owner, name, named in found:
            value = named.__func__ if isinstance(named, staticmethod | classmethod) else named
            if self.values and is_iterator(value) and not is_installed(owner):
                self.iterators.append((_space(owner), name, value))
            if (text := written(value)) is not None:
                self.plain.append((name, text))
            elif _leads_further(owner, value):
                self.roots.append(value)
                yield value
            elif callable(value):
                self.plain.append((name, Same(value)))
                if isinstance(value, types.FunctionType):
                    self.called.append(value)
                    self.plain.append((value.__code__, *map(written, defaults(value))))
                if value is os.getenv:
                    yield os.environ
            elif not is_a(owner, types.ModuleType) or is_users_code(owner):
                self.roots.append(value)

    def restore(self) -> None:
        """Put back what changed; all else is left alone, as another thread may be about to change it."""
        for value, held in self.objects:
            _refill(attributes_of(value), held)
        for value, content in self.containers:
            _refill(value, content)
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                cell.cell_contents = content
        for value, was in self.pointed:
            if is_a(value, CACHED) and len(pointed_to(value)) > len(was) == 1:  # what is left is made anew
                value.cache_clear()
        for value in self.bare:
            attributes(value).clear()
        self._restore_values()
        for tensor, version, kept in self.tensors:
            _restore(tensor, version, kept)
        if self.assigned is not None:
            self.assigned.restore()

    def _restore_values(self) -> None:
        for value, values in self.arrays:
            if not _same_values(value, values):
                value[...] = values
        for each in self.hidden:
            each.restore()

    @property
    def owners(self) -> list[Any]:
        """The attributes of each object, and the dicts, lists and sets."""
        return [*(attributes(value) for value, _ in self.objects), *(value for value, _ in self.containers)]

    def changes(self) -> Iterator[Change]:
        """What is another object than it was."""
        for number, (value, held) in enumerate(self.objects):
            yield from _changed(f"{number} {type(value).__name__}", held, attributes(value), number)
        for number, (value, content) in enumerate(self.containers):
            now, was = map(_by_key, (value, content))
            fixed = is_a(value, set) or (not is_a(value, dict) and len(was) != len(now))
            yield from _changed(
                f"{number} {type(value).__name__}", was, now, None if fixed else len(self.objects) + number
            )
        for number, (value, values) in enumerate(self.arrays):
            if not _same_values(value, values):
                yield Change(f"array {number}", value.tolist(), None, None, values)
        for number, (cell, content) in enumerate(self.cells):
            if cell.cell_contents is not content:
                yield Change(f"variable {number}", cell.cell_contents, None, None, content)
        yield from self._changes_of_others()

    def _changes_of_others(self) -> Iterator[Change]:
        for value, was in self.pointed:
            if len(pointed_to(value)) != len(was) or any(map(is_not, pointed_to(value), was)):
                yield Change(f"what a {type(value).__name__} stands for", pointed_to(value), None, None, was)
        for value in self.bare:
            yield from (
                Change(f"{name} of a {type(value).__name__}", now, None, name, Absent.ABSENT)
                for name, now in attributes(value).items()
            )

    def moved_on(self) -> str | None:
        """The class of an object whose state is in no attribute (a generator of random numbers), and is another one."""
        return next((type(each.value).__name__ for each in self.hidden if each.is_changed), None)

    def changed_parameter(self) -> bool:
        """Whether a parameter was changed in place."""
        held = ((value, version, kept) for value, version, kept in self.tensors if isinstance(value, nn.Parameter))
        return any(
            version_of(value) != version or (kept is not None and not _equal(value, kept))
            for value, version, kept in held
        )


def unsized(model: Any) -> str:
    """The name of a parameter or buffer of a lazy module that has no size yet; empty if there is none."""
    owner: Any = getattr(model, "__self__", model)
    if not is_a(owner, nn.Module):
        return ""
    named = chain(owner.named_parameters(), owner.named_buffers())
    return next((name for name, value in named if is_lazy(value)), "")


def _copy(tensor: Tensor) -> Tensor:
    """A copy; with its history if that may be lost, as a state's is that the model cuts off."""
    if tensor.is_leaf or tensor._is_view():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.clone()


def _restore(tensor: Tensor, version: int, kept: Tensor | None) -> None:
    """Give a tensor the values that it had when it was copied, and the history, if it has another one."""
    if kept is None:
        return
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


def _content(value: Any) -> Any:
    """A copy of a dict, list, set or the like: what it holds, and not what a subclass makes of that."""
    kind = next((each for each in (dict, list, set) if is_a(value, each)), None)
    return kind(items_of(value)) if kind else copy.copy(value)


def _leads_further(owner: Code, value: Any) -> bool:
    """Whether a walk goes on from what stands for a name; not to classes and modules that installed code names."""
    if is_a(value, type | types.ModuleType):
        return not is_installed(owner) and (is_a(value, types.ModuleType) or is_users_code(value))
    if is_a(owner, types.ModuleType) and not is_users_code(owner):
        read_at_calls = value is os.environ or is_a(value, list)  # sys.argv, warnings.filters
        return read_at_calls or (is_a(value, types.FunctionType) and is_users_code(value))
    if value is sys.modules:
        return False
    return is_a(value, _FOLLOWED) or has_attributes(value) or hides_state(value) or is_bound_in_c(value)


def _space(owner: Code) -> dict[str, Any] | type:
    """Where the names stand that code reads."""
    if isinstance(owner, type):
        return owner
    return owner.__globals__ if isinstance(owner, types.FunctionType) else vars(owner)


def _by_key(content: Any) -> dict[Any, Any]:
    """What a container holds: items of a set by themselves, as their order is another one where one is set again."""
    if is_a(content, set):
        return {each: each for each in items_of(content)}
    return dict(items_of(content) if is_a(content, dict) else enumerate(items_of(content)))


def _changed(name: str, was: Mapping[Any, Any], now: Mapping[Any, Any], owner: int | None) -> Iterator[Change]:
    for key in now:
        found = now[key]
        if (key not in was or was[key] is not found) and not _is_remembered(key, found):
            yield Change(f"{name}.{key}", found, owner, key, was.get(key, Absent.ABSENT))
    for key in was.keys() - now.keys():
        yield Change(f"{name}.{key} is gone", None, None, key, was[key])


def _is_remembered(key: Any, value: Any) -> bool:
    """Whether an item is what code remembers of an object that it does not own: weak references, under a weak key."""
    if not isinstance(key, weakref.ref):
        return False
    return is_a(value, weakref.ref) or (is_a(value, tuple) and all(is_a(each, weakref.ref) for each in value))


def _same_values(array: Any, values: Any) -> bool:
    if array.dtype.hasobject:
        return array.shape == values.shape and [*map(id, array.flat)] == [*map(id, values.flat)]
    return array is values or np.array_equal(array, values, equal_nan=array.dtype.kind in "fc")


def _refill(value: Any, content: Any) -> None:
    """Give a list, dict, set or the like the content that it had, if it has another one, but for what is remembered."""
    if is_a(value, set):
        changed = {*map(id, items_of(value))} != {*map(id, content)}
    elif is_a(value, MutableMapping):
        changed = [*_identities(value)] != [*_identities(content)]
    elif is_a(value, list | deque):
        changed = [*map(id, items_of(value))] != [*map(id, items_of(content))]
    else:
        changed = value != content
    if changed and is_a(value, list | array.array | bytearray):
        value[:] = content
    elif changed:
        kept = {key: item for key, item in value.items() if _is_remembered(key, item)} if type(value) is dict else {}
        value.clear()
        (value.extend if is_a(value, deque) else value.update)(content)
        if kept:
            value.update(kept)


def _identities(mapping: Mapping[Any, Any]) -> Iterator[tuple[Any, int]]:
    items = items_of(mapping) if isinstance(mapping, dict) else mapping.items()
    return ((key, id(item)) for key, item in items)
