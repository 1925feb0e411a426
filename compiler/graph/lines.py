"""Lines of the user's code, for messages."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Any

from torch import fx

_OURS = ("torch", "reroll")
_GATHERING = str(Path("processes", "sharded.py"))
"""Its lines stand in a model's own graph, in front of the line that reads a parameter."""


def where(node: fx.Node) -> str:
    """The line of the user's code that made a node, for messages."""
    trace = (node.stack_trace or "").strip().splitlines()
    files = [
        index for index, line in enumerate(trace) if line.lstrip().startswith("File ") and f'{_GATHERING}"' not in line
    ]
    if not files:
        return f"node {node.name}"
    code = trace[files[-1] + 1].strip() if files[-1] + 1 < len(trace) else ""
    return f"{trace[files[-1]].strip()}: {code}".rstrip(": ")


def take_line(node: fx.Node, source: fx.Node) -> None:
    """Say that a node comes from the line of another; nothing where that has none, as torch joins what it finds."""
    if trace := source.meta.get("stack_trace"):
        node.meta["stack_trace"] = trace


def user_trace() -> str:
    """The line of the user's code that is running: the innermost one outside of torch and reroll; as in a traceback."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    if frame is None:
        return "the model"
    name, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(name, number).strip()
    return f'File "{name}", line {number}, in {frame.f_code.co_name}\n    {code}'.rstrip()


def user_line() -> str:
    """The same in one line."""
    return ": ".join(map(str.strip, user_trace().split("\n")))
