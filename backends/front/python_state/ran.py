"""Which code ran while a model was recorded: what it names, in whichever library, the record may have read."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from reroll.backends.front.python_state.code_ownership import reads_settings
from reroll.backends.front.python_state.outside import Outside


class Ran:
    """The functions that ran in all records of a model, one for each piece of code over the globals that it had.

    ``functions`` only grows, until it is given up. Torch's code counts where it is that of modules (``torch.nn``),
    Python's and reroll's nowhere. A function is made anew around its code, as only that is seen to run, so its closure
    is empty. whole: whether a run before the first record has ended, which an import may end too soon.
    """

    def __init__(self) -> None:
        self.functions: list[types.FunctionType] = []
        self._known = set[tuple[types.CodeType, int]]()
        self._given_up = self.whole = False
        self.imported = set[str]()

    def imports(self, module: str) -> None:
        """Import a module that a model imports, or try it: where it is not there, the model may do without."""
        self.imported.add(module)
        with suppress(Exception):
            importlib.import_module(module)

    def give_up(self) -> None:
        """Note nothing from now: what ran changes what it reads, and that is in nothing that is put back."""
        self._given_up = True
        self.functions.clear()

    @contextmanager
    def noting(self, meet: Callable[[types.CodeType, dict[str, Any]], None] | None = None) -> Iterator[None]:
        """Note what runs inside, in this thread; not what is called whenever Python collects, which is nothing of the
        model's. Raises TakenError where it takes something from outside, and FirstImportError where it imports.
        ``meet`` is told of code before it runs for the first time."""
        found: dict[tuple[types.CodeType, int], dict[str, Any]] = {}
        outside = Outside(self.imported)

        def note(frame: types.FrameType, event: str, of: object) -> None:
            if event == "call":
                outside.see(frame)
                space = frame.f_globals
                if meet is not None and (frame.f_code, id(space)) not in found:
                    outside.meet(meet, frame.f_code, space)
                found[frame.f_code, id(space)] = space
            elif event == "c_call":
                outside.refuse(frame, of)

        before: Any = sys.getprofile()
        if before is not None and not callable(before) and not hasattr(before, "enable"):
            yield  # somebody else's profiler, which could not be put back
            return
        called = gc.callbacks[:]
        gc.callbacks.clear()
        sys.setprofile(note)
        try:
            yield
        finally:
            gc.callbacks[:0] = called
            if before is None or callable(before):
                sys.setprofile(before)
            else:
                before.enable()  # cProfile's
            for (code, number), space in found.items():
                self._note(code, number, space)
        if outside.refused is not None:
            raise outside.refused

    def _note(self, code: types.CodeType, number: int, space: dict[str, Any]) -> None:
        if not self._given_up and (code, number) not in self._known and reads_settings(space.get("__name__")):
            self._known.add((code, number))
            empty = tuple(types.CellType() for _ in code.co_freevars)
            self.functions.append(types.FunctionType(code, space, closure=empty))
