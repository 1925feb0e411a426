"""Errors of Dynamo's own, such as an assertion within torch, which are no errors of the model that it reads.

They are told by their traceback, which goes through ``convert_frame``, where Dynamo compiles.

Private torch API, tried on 2.11 and 2.13: ``torch._dynamo.exc.TorchRuntimeError``, raised where an operation of the
model fails on fake tensors.
"""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import NamedTuple

from torch._dynamo.exc import TorchRuntimeError

from reroll.errors import RerollError, is_shortage

_COMPILING, _NOT_USERS = "torch._dynamo.convert_frame", {"reroll", "torch", "contextlib", "functools"}


class Failure(NamedTuple):
    """What failed, in words, and whether any function of the model had begun by then."""

    text: str
    begun: bool


def failure_of(error: Exception) -> Failure | None:
    """What an error says of Dynamo; None where it is the model's, or reroll's, or says that memory ran out."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, RerollError | TorchRuntimeError) or is_shortage(error) or _COMPILING not in modules:
        return None
    before = {name.partition(".")[0] for name in modules[: modules.index(_COMPILING)]}
    lines = re.findall(r'File "([^"]+)", line (\d+), in ', str(error).partition("from user code:")[2])
    where = " at {}:{}".format(*lines[-1]) if lines else ""
    first = next(iter(str(error).strip().splitlines()), "")
    return Failure(f"{where}: {type(error).__name__}: {first}", not before <= _NOT_USERS)
