"""Statements of the user's code: in which one each operation of a graph was made, from the outermost call to it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_TORCH = str(Path(torch.__file__).parent)
_BRANCHES = (ast.IfExp, ast.BoolOp, ast.comprehension, ast.If, ast.While, ast.For, ast.Try, ast.Match)


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
