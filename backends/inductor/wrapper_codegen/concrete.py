"""Inductor's wrapper for sizes that are symbols, as its wrapper for given sizes.

Inductor reads sizes from the first operands (``s56 = reroll_size_0``), and writes what depends on them as arithmetic
(``32*s56``). Here these operands go, and the arithmetic is done: what is left is of the forms that ``wrapper`` reads.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reroll.backends.inductor.wrapper_codegen.wrapper import body_of

_OPERATORS: Mapping[Any, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"max": max, "min": min}
_UNPACKED = re.compile(r"^(\s*)(\w+(?:, \w+)*),? = args$")


def at_sizes(source: str, sizes: Mapping[str, int]) -> str | None:
    """The text of a wrapper at the sizes that its operands of these names have; None if it is of another form."""
    body = body_of(source)
    if body is None or body.indent is None:
        return None
    known, lines, unpacked = dict(sizes), list[str](), False
    for statement in body.statements:
        line = statement.line
        if match := _UNPACKED.match(line):
            names = [name for name in match[2].split(", ") if name not in sizes]
            lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args" if names else "")
            unpacked = True
        elif (bound := _bound(statement.text, known)) is not None:
            known |= bound
        else:
            lines.append(_at(line, statement.text, known))
    if not unpacked:
        return None
    return source[: body.start] + "".join(f"{body.indent}{line}\n" for line in lines) + source[body.end :]


def _bound(text: str, known: Mapping[str, int]) -> dict[str, int] | None:
    """The symbol that a statement binds to a size."""
    name, found, value = text.partition(" = ")
    return {name: known[value]} if found and value in known else None


def _at(line: str, text: str, known: Mapping[str, int]) -> str:
    """A statement with numbers in place of what is made of sizes alone."""
    if known.keys().isdisjoint(re.findall(r"\w+", text)):
        return line
    parts = (ast.unparse(_Numbers(known).visit(each)) for each in ast.parse(text).body)
    return "; ".join(parts)


class _Numbers(ast.NodeTransformer):
    """Puts numbers for names, and does the arithmetic that is left of them."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A size by its number."""
        return ast.Constant(self.known[node.id]) if node.id in self.known else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Arithmetic of two numbers by its result."""
        self.generic_visit(node)
        return _result(node, _OPERATORS.get(type(node.op)), [node.left, node.right])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """The same of one number."""
        self.generic_visit(node)
        return _result(node, operator.neg if isinstance(node.op, ast.USub) else None, [node.operand])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The larger or smaller of numbers by its result."""
        self.generic_visit(node)
        function = _FUNCTIONS.get(node.func.id) if isinstance(node.func, ast.Name) and not node.keywords else None
        return _result(node, function, node.args)


def _result(node: ast.expr, function: Callable[..., int] | None, operands: Sequence[ast.expr]) -> ast.expr:
    values = [each.value for each in operands if isinstance(each, ast.Constant) and isinstance(each.value, int)]
    whole = function is not None and len(values) == len(operands)
    return ast.Constant(function(*values)) if function and whole else node
