"""What functions name that are met in a run alone: by a name that is computed, from a table, by an import.

Nothing that a model holds or names leads to them, so the state that is noted before a first run knows nothing of them.
Each is noted when it is first called, before its body runs, and put back behind the run.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from reroll.backends.front.python_state.code_ownership import is_users_code
from reroll.backends.front.python_state.names import parts_of
from reroll.backends.front.python_state.outside import TakenError
from reroll.backends.front.python_state.state import State


class Late:
    """Around a run: what functions name that are none of those which a ``state`` knows."""

    def __init__(self, state: State) -> None:
        self.known, self.states = set(_codes(state)), list[State]()

    def __enter__(self) -> Late:
        return self

    def __exit__(self, *_: object) -> None:
        for each in reversed(self.states):  # the first that noted a value has it as it was
            each.restore()

    def meet(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """Note what a function names that is about to run. Raises TakenError where that is an iterator."""
        if code in self.known:
            return
        self.known.update(parts_of(code))
        function = types.FunctionType(code, space, closure=tuple(types.CellType() for _ in code.co_freevars))
        if not is_users_code(function):
            return
        state = State.of(parameters=True, ran=[function])
        if state.iterators:
            raise TakenError(f"reroll.compile: the model may take from an iterator that {code.co_name} names.")
        self.states.append(state)


def _codes(state: State) -> Iterator[types.CodeType]:
    """The code of the functions that a state knows."""
    held = (vars(each).values() if isinstance(each, type) else (each,) for each in (*state.code, *state.called))
    for value in (value for values in held for value in values):
        parts: tuple[Any, ...] = (getattr(value, "__func__", value),)
        if isinstance(value, property):
            parts = (value.fget, value.fset)
        for each in parts:
            if isinstance(each, types.FunctionType):
                yield from parts_of(each.__code__)
