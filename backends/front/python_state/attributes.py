"""The attributes of an object, wherever they are kept."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from reroll.backends.front.python_state.code_ownership import is_users_code, once_a_class
from reroll.capture.recorder.identity import is_a


def attributes(value: Any) -> MutableMapping[str, Any]:
    """The attributes of an object, in its dict and in its slots; not those by which Dynamo marks tensors."""
    kind: Any = type(value)
    return _Attributes(value) if is_a(value, Tensor) or slots_of(kind) else vars(value)


class _Attributes(MutableMapping[str, Any]):
    """Read and written without the object's own ways to do so (``__setattr__``, ``dataclass(frozen=True)``)."""

    def __init__(self, value: Any) -> None:
        kind: Any = type(value)
        self._value, self._slots = value, slots_of(kind)
        self._dict: dict[str, Any] = getattr(value, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._dict[name]
        try:
            return self._slots[name].__get__(self._value, type(self._value))
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, item: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._value, item)
        else:
            self._dict[name] = item

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._value)
        else:
            del self._dict[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._slots if name in self)
        yield from (name for name in self._dict if name not in self._slots and not name.startswith("_dynamo_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@once_a_class
def slots_of(kind: Any) -> Mapping[str, types.MemberDescriptorType]:
    """The slots of a user's class and of the classes that it is made from (``__slots__``)."""
    classes = [each for each in reversed(kind.__mro__) if is_users_code(each) and "__slots__" in vars(each)]
    found = [(name, each) for owner in classes for name, each in vars(owner).items()]
    return {name: each for name, each in found if is_a(each, types.MemberDescriptorType)}
