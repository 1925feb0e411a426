"""Lines of the user's code, for messages, and the statements that they belong to."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

CHECKPOINTED = "checkpointed"
"""What is noted in ``meta`` of what ``torch.utils.checkpoint`` runs."""
_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_OURS = ("torch", "reroll")
_GATHERING = str(Path("processes", "sharded.py"))
"""Its lines stand in a model's own graph, in front of the line that reads a parameter."""
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_TORCH = str(Path(torch.__file__).parent)
_BRANCHES = (ast.IfExp, ast.BoolOp, ast.comprehension, ast.If, ast.While, ast.For, ast.Try, ast.Match)


def where(node: fx.Node) -> str:
    """The line of the user's code that made a node, for messages."""
    lines = _frames(node)
    return lines[-1] if lines else f"node {node.name}"


def where_all(nodes: Sequence[fx.Node]) -> str:
    """The first line of the function that made all of some nodes, itself or by what it calls; as that of a loop."""
    traces = [trace for trace in map(_frames, nodes) if trace]
    if not traces:
        return where(nodes[0])
    depth = 0
    while all(len(trace) > depth + 1 and trace[depth] == traces[0][depth] for trace in traces):
        depth += 1
    here = [trace[depth] for trace in traces]
    if len({_function(line) for line in here}) > 1:  # the line above calls them all
        return traces[0][max(depth - 1, 0)]
    return min(here, key=_number)


def _frames(node: fx.Node) -> list[str]:
    """The lines of the user's code from the outermost to that which made a node, each as one of a message."""
    trace = (node.stack_trace or "").strip().splitlines()
    found = []
    for index, line in enumerate(trace):
        if line.lstrip().startswith("File ") and f'{_GATHERING}"' not in line:
            code = trace[index + 1].strip() if index + 1 < len(trace) else ""
            found.append(f"{line.strip()}: {code}".rstrip(": "))
    return found


def _number(line: str) -> int:
    found = re.search(r", line (\d+)", line)
    return int(found[1]) if found else 0


def _function(line: str) -> tuple[str, str]:
    """File and function of a line."""
    file, _, rest = line.partition(", line ")
    return file, rest.partition(", ")[2].partition(": ")[0]


def take_line(node: fx.Node, source: fx.Node) -> None:
    """Say that a node comes from the line of another; nothing where that has none, as torch joins what it finds."""
    if trace := source.meta.get("stack_trace"):
        node.meta["stack_trace"] = trace


def user_trace() -> str:
    """The lines of the user's code that are running, called by one another, without torch's; as in a traceback."""
    return "\n".join(reversed([*_running()])) or "the model"


def user_line() -> str:
    """The innermost one of these, in one line."""
    return _in_one(next(_running(), "the model"))


def line_of(frame: FrameType) -> str:
    """The line at which a frame is, in one line."""
    return _in_one(_shown(frame))


def _in_one(shown: str) -> str:
    return ": ".join(map(str.strip, shown.split("\n")))


def is_checkpointed() -> bool:
    """Whether the user's code that is running was called by ``torch.utils.checkpoint``."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


def _running() -> Iterator[str]:
    """The lines of the user's code from the innermost on to that which reroll has called."""
    frame: Any = sys._getframe(1)
    found = False
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if found and package == "reroll":
            return
        if package not in _OURS:
            found = True
            yield _shown(frame)
        frame = frame.f_back


def _shown(frame: Any) -> str:
    """The line at which a frame is, as in a traceback."""
    name, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(name, number).strip()
    return f'File "{name}", line {number}, in {frame.f_code.co_name}\n    {code}'.rstrip()


class _Found(BaseException):
    """Raised in a run to end it; no ``except Exception`` of a model catches it."""


def line_that_changes(is_changed: Callable[[], bool], run: Callable[[], object]) -> str:
    """The line of the user's code, in a run, behind which something is changed, in one line."""
    before, last = sys.gettrace(), "the model"

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal last
        if is_changed():
            raise _Found
        shown = frame.f_back if event == "return" else frame
        if shown is not None and not _is_others(shown):
            last = line_of(shown)
        return trace

    def begin(frame: Any, event: str, argument: Any) -> Any:
        return None if _is_others(frame) else trace

    sys.settrace(begin)
    try:
        with suppress(_Found, Exception):  # what a model raises is told where it is run for its values
            run()
    finally:
        sys.settrace(before)
    return last


def _is_others(frame: Any) -> bool:
    """Whether code of torch's, of this project's or of Python's runs in a frame."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _OURS or package in sys.stdlib_module_names


@dataclass(frozen=True, slots=True, order=True)
class Statement:
    """A statement by its first ``line``; of a compound one only what stands before its body. ``branches``: whether it
    may do different things at different times."""

    file: str
    function: str
    line: int
    branches: bool


def statements_of(node: fx.Node) -> tuple[Statement, ...]:
    """The statements that called one another to make an operation, the outermost first, without torch's; none where
    they are not known."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    named = [(each["file"], each["function"], int(each["line"])) for each in frames]
    found = [_statement(*frame) for frame in named if not frame[0].startswith(_TORCH)]
    return tuple(each for each in found if each) if all(found) else ()


def _statement(file: str, function: str, line: int) -> Statement | None:
    known = _lines("".join(linecache.getlines(file))).get(line)
    return Statement(file, function, *known) if known else None


@lru_cache(maxsize=64)
def _lines(source: str) -> dict[int, tuple[int, bool]]:
    """For each line of a source that is part of a statement, where that begins, and whether it branches."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found = dict[int, tuple[int, bool]]()
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt):
            branches = any(isinstance(each, _BRANCHES) for each in _parts(node))
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = node.lineno, branches
    return found


def _parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What a statement consists of, but for the statements in it."""
    waiting: list[ast.AST] = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += (child for child in ast.iter_child_nodes(each) if not isinstance(child, ast.stmt))
