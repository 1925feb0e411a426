"""A failing program made smaller: lines are left out while it stays a program, and fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from judge import Verdict
from kinds import Model
from programs import Program

Lines = TypeVar("Lines", Program, Model)


def shrink(program: Lines, failed: Verdict, again: Callable[[Lines], Verdict], seconds: float) -> Lines:
    """The smallest program that was found within some time."""
    end, smaller = time.monotonic() + seconds, True
    while smaller:
        smaller = False
        for part, number in reversed(program.lines):
            if time.monotonic() > end:
                return program
            tried = program.without(part, number)
            if _compiles(tried) and _same(again(tried), failed):
                program, smaller = tried, True
                break
    return program


def _compiles(program: Program | Model) -> bool:
    try:
        compile(program.source(), "program", "exec")
    except SyntaxError:
        return False
    return True


def _same(found: Verdict, failed: Verdict) -> bool:
    """The same kind of failure, and for an error the same one."""
    return found.kind == failed.kind and (found.kind != "raw" or found.why.split(":")[0] == failed.why.split(":")[0])
