"""The Python sources of the project, and what can be read off them without running them."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"compiler": "reroll", "passes": "reroll.passes", "backends": "reroll.backends"}
"""Folders of the package, and the names under which they are imported."""
FOLDERS = (*PACKAGES, "tests", "demos", "benchmarks", "docs")

Function = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the root and its text."""

    path: str
    text: str

    @property
    def folder(self) -> str:
        return self.path.partition("/")[0]

    @property
    def module(self) -> str:
        """The name under which it is imported; empty for what is not installed."""
        top, *rest = Path(self.path).with_suffix("").parts
        return ".".join([PACKAGES[top], *rest]).removesuffix(".__init__") if top in PACKAGES else ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> tuple[tokenize.TokenInfo, ...]:
        return tuple(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def with_code(self) -> frozenset[int]:
        """The numbers of the lines that are not blank, nor comments alone."""
        return frozenset(n for t in self.tokens if t.type not in LAYOUT for n in range(t.start[0], t.end[0] + 1))

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    @cached_property
    def for_types(self) -> frozenset[int]:
        """The identities of the nodes that only type checkers read."""
        return frozenset(
            id(inner)
            for node in self.nodes
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        )

    @cached_property
    def in_functions(self) -> frozenset[int]:
        """The identities of the nodes that run when a function is called."""
        return frozenset(id(inner) for function in self.functions for inner in ast.walk(function))

    def code_lines(self, function: Function) -> int:
        """Lines of code of a function: docstrings, comments and blank lines are free."""
        inside = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
        return len(self.with_code & inside - docstring_lines(function))


def docstring_lines(node: ast.AST) -> set[int]:
    """The lines of every docstring in and under a node."""
    lines: set[int] = set()
    for owner in ast.walk(node):
        if isinstance(owner, (Function, ast.ClassDef)) and ast.get_docstring(owner, clean=False) is not None:
            first = owner.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the project."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths)


def imported(node: ast.AST) -> list[str]:
    """The dotted names that a statement imports; of ``from a import b`` it gives ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + ".".join(filter(None, (node.module, alias.name))) for alias in node.names]
    return []


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the modules or lies in one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def line(node: ast.AST) -> int:
    """The line of a statement or an expression."""
    return int(getattr(node, "lineno", 0))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain on a name, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""
