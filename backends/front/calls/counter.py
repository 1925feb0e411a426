"""The number that says how many steps a loop has, where no tensor has a dimension of time: ``range(num_steps)``.

It is a parameter of the model, an attribute that can be reached from it, or a variable of its function, and it is set
to few steps while the model is looked at or runs on tokens. Other threads never see that: it happens within a turn, and
while a graph runs, which others may do at the same time, the number is what the user set.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np
from torch import nn

from reroll.errors import OptionError

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Counter:
    """The number ``key`` of ``owner``: an object's attribute, or an entry of a dict, of variables of an enclosing
    function (``_Variables``), or of the arguments (``_Arguments``). ``name`` is how the user calls it.
    """

    name: str
    owner: Any
    key: str
    steps: int

    @contextmanager
    def at(self, steps: int) -> Iterator[None]:
        """Inside, a number that is no argument is another one."""
        before = _read(self.owner, self.key)
        self._set(steps)
        try:
            yield
        finally:
            self._set(before)

    def given(self, args: Any, kwargs: Any, steps: int) -> tuple[Any, Any]:
        """The arguments of a call with so many steps."""
        if not isinstance(self.owner, _Arguments):
            return args, kwargs
        bound = self.owner.signature.bind(*args, **kwargs)
        bound.arguments[self.key] = steps
        return bound.args, bound.kwargs

    def _set(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
            return
        try:
            setattr(self.owner, self.key, value)
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"reroll.compile sets steps={self.name!r} to a few steps while it looks at the model, but it cannot be "
                f"set: {error}. Name a plain attribute, variable or parameter that the range of the loop is made of."
            ) from error


class _Variables(dict[str, Any]):
    """Variables of an enclosing function, by name."""

    def __init__(self, function: Any) -> None:
        self.cells: Mapping[str, CellType] = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )
        super().__init__({name: _content(cell) for name, cell in self.cells.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value
        super().__setitem__(name, value)


class _Arguments(dict[str, Any]):
    """The arguments of a call by the names of their parameters, defaults included."""

    def __init__(self, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.signature = signature
        super().__init__(bound.arguments)


def find_counter(
    model: Callable[..., Any], signature: inspect.Signature | None, name: str, args: Any, kwargs: Any
) -> Counter:
    """What a name, or a path of names, stands for in a call. Raises OptionError if it is no number of steps."""
    arguments = [] if signature is None else [_Arguments(signature, args, kwargs)]
    place = _place(name, [*arguments, *_owners(model)])
    if place is None:
        raise OptionError(
            f"reroll.compile: steps={name!r} is no parameter of the model, no attribute of it, and no variable that "
            f"its function reads.{told(model)}"
        )
    value = _read(*place)
    if value is _NOTHING or type(value) is bool or not isinstance(value, int | np.integer) or value < 1:
        found = "not there" if value is _NOTHING else f"{value!r}, {type(value).__name__}"
        raise OptionError(
            f"reroll.compile: steps={name!r} must name a number of steps, a whole number from 1 on, but it is {found}."
        )
    return Counter(name, *place, int(value))


def told(model: Callable[..., Any]) -> str:
    """What to say of the numbers over which a model's function has ranges: ``steps`` may name them."""
    function = _function(model)
    found = dict.fromkeys(_ranges(function)) if function is not None else ()
    named = []
    for name in found:
        place = _place(name, list(_owners(model)))
        value = _read(*place) if place else None
        if type(value) is int:
            named.append(f"steps={name!r} names that of a loop over range({name}), which is {value}")
    return f" {'; '.join(named)}." if named else ""


def _place(name: str, owners: Sequence[Any]) -> tuple[Any, str] | None:
    """Owner and key of what a name, or a path of names, stands for; None where no owner has the first of them."""
    key, *path = name.split(".")
    found = [each for each in owners if _read(each, key) is not _NOTHING]
    if not found:
        return None
    owner = found[0]
    for each in path:
        owner, key = _read(owner, key), each
    return owner, key


def _ranges(function: Any) -> Iterator[str]:
    """Names, or paths of names, that a function calls ``range`` with; ``self`` is left out."""
    code = list(dis.get_instructions(function))
    for at, each in enumerate(code):
        if each.opname == "LOAD_GLOBAL" and each.argval == "range":
            names = []
            for following in code[at + 1 :]:
                if not following.opname.startswith("LOAD_") or not isinstance(following.argval, str):
                    break
                names.append(following.argval)
            if names[:1] == ["self"]:
                names = names[1:]
            if names:
                yield ".".join(names)


def _owners(model: Callable[..., Any]) -> Iterator[Any]:
    """What may hold a name: the model, or the object whose method it is, its enclosing functions, its globals."""
    inside = inspect.unwrap(model)
    yield getattr(inside, "__self__", inside)
    function = _function(model)
    if function is not None:
        yield _Variables(function)
        yield function.__globals__


def _function(model: Callable[..., Any]) -> Any:
    """The Python function that a call of the model runs, if it is one."""
    found: Any = inspect.unwrap(model)
    found = found.forward if isinstance(found, nn.Module) else found
    if not inspect.isroutine(found):
        found = type(found).__call__
    found = getattr(found, "__func__", found)
    return found if inspect.isfunction(found) else None


def _read(owner: Any, key: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(key, _NOTHING)
    return getattr(owner, key, _NOTHING)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: nothing was assigned yet
        return _NOTHING
