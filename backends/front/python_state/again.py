"""Says once that a model is looked at again at every call, and what is another then: it takes longer than the call."""

from __future__ import annotations

import ast
from typing import Any

from reroll.backends.front.python_state.keys import Hashed
from reroll.capture.recorder.identity import Same
from reroll.errors import warn

_IN_A_ROW = 3
_SIZES = "a tensor"  # of another size: a batch that came for the first time, of which what is compiled tells
_PARTS = (
    "an argument",
    "the model",
    "an argument",
    "what its code names",
    _SIZES,
    "a mode of torch",
    "what Python and torch say of the process",
)
"""Of a key of ``Reach.noted``."""


class Again:
    """The calls of one model: the lengths that came, each the sizes of all arguments and a number of operations, and
    how many of the last ones had it looked at for one reason."""

    def __init__(self) -> None:
        self._lengths, self._reason, self._change = set[Any](), "", ""
        self._key: Any = None
        self._count, self.told = 0, False

    def note(self, length: Any, key: Any, *, looked: bool) -> None:
        """Note a call with its key, and whether the model was looked at, then with its length; warn at the third in a
        row. What goes to and fro, such as whether gradients are taken, is not another one each time."""
        before, self._key = self._key, key
        if not looked:
            self._count = 0
        elif length in self._lengths and before is not None:
            name, change = difference(before, key)
            known = name == _SIZES or (name == self._reason and change and change == self._change)
            self._count = 0 if known else self._count + 1 if name == self._reason else 1
            self._reason, self._change = name, change
            if self._count == _IN_A_ROW and not self.told:
                self._tell(f"{name}{change}")
        self._lengths.add(length)

    def _tell(self, what: str) -> None:
        self.told = True
        warn(
            f"The model was looked at anew in {_IN_A_ROW} calls in a row, which takes longer than a call: {what} was "
            "another one each time. Keep what changes at every call in a tensor, or where the forward does not read it."
        )


def difference(before: Any, now: Any) -> tuple[str, str]:
    """What differs first in two keys of ``Reach.noted``: its name, and how."""
    for part, one, other in zip(_PARTS, before, now, strict=True):
        if one != other:
            return _difference(one, other, part)
    return "something", ""


def _difference(before: Any, now: Any, name: str) -> tuple[str, str]:
    before, now = (each.value if isinstance(each, Hashed | Same) else each for each in (before, now))
    if not isinstance(before, tuple) or not isinstance(now, tuple) or len(before) != len(now):
        plain = isinstance(before, str | int) and isinstance(now, str | int)
        return name, f" ({before}, then {now})" if plain else ""
    at = next((at for at, (one, other) in enumerate(zip(before, now, strict=True)) if one != other), None)
    if at is None:
        return name, ""
    return _difference(before[at], now[at], _named(now[0]) if at == 1 and len(now) == 2 and _named(now[0]) else name)


def _named(key: Any) -> str:
    """The name of what stands beside it: as code has it, or of an attribute or item, in words."""
    if isinstance(key, str):
        return key
    if not isinstance(key, tuple) or len(key) != 2 or key[0] not in (str, bytes):
        return ""
    name = ast.literal_eval(key[1])
    return name if isinstance(name, str) else name.decode("utf-8", "replace")
