"""The networks of the tests' zoo, each changed in one place: the second source of programs, beside ``programs.py``.

A seed picks a network, a place in it and a change: another number, another operator, another variable, a statement left
out or done twice, an index moved by one. Most mutants are programs that somebody might write; those that eager cannot
run are none.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[2] / "tests" / "support" / "zoo"
OPERATORS = (ast.Add, ast.Sub, ast.Mult)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
Change = Callable[[random.Random], object]


@dataclass(frozen=True)
class Mutant:
    """A network of the zoo with one place changed: the text of its file, and in words what was changed."""

    seed: int
    name: str
    text: str
    what: str

    def source(self) -> str:
        """The changed function alone."""
        function = next(each for each in functions(ast.parse(self.text)) if each.name == self.name)
        return f"# {self.what}\n{ast.unparse(function)}\n"


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The networks of a file."""
    return [each for each in tree.body if isinstance(each, ast.FunctionDef) and _is_entered(each)]


def _is_entered(function: ast.FunctionDef) -> bool:
    return any("zoo" in ast.unparse(decorator) for decorator in function.decorator_list)


def mutant(seed: int) -> Mutant:
    """The mutant of a seed."""
    draw = random.Random(f"mutant {seed}")
    path = draw.choice(sorted(SUPPORT.glob("zoo_*.py")))
    tree = ast.parse(path.read_text())
    function = draw.choice(functions(tree))
    before = ast.unparse(function).splitlines()
    _, change = draw.choice(list(changes(function)))
    change(draw)
    after = ast.unparse(ast.fix_missing_locations(function)).splitlines()
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    what = f"{pairs[0][0].strip()} -> {pairs[0][1].strip()}" if pairs else "the last line left out"
    return Mutant(seed, function.name, ast.unparse(tree), f"{path.name}, {function.name}: {what}")


def changes(function: ast.FunctionDef) -> Iterator[tuple[int, Change]]:
    """Every place that can be changed, as (line, change)."""
    stored = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    names = sorted(stored | {argument.arg for argument in function.args.args[1:]})
    for node in [each for statement in function.body for each in ast.walk(statement)]:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield line, _another_number(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            yield line, _another(node, OPERATORS)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], COMPARISONS):
            yield line, _another_comparison(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            yield line, _another_name(node, names)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            yield line, _moved(node)
        for body in (getattr(node, part) for part in ("body", "orelse") if isinstance(getattr(node, part, None), list)):
            for statement in body:
                yield statement.lineno, _left_out(body, statement)
                yield statement.lineno, _twice(body, statement)


def _another_number(node: ast.Constant) -> Change:
    def change(draw: random.Random) -> None:
        value: Any = node.value
        node.value = draw.choice((value + 1, value - 1, value * 2) if isinstance(value, int) else (value / 2, -value))

    return change


def _another(node: ast.BinOp, operators: tuple[type[ast.operator], ...]) -> Change:
    def change(draw: random.Random) -> None:
        node.op = draw.choice([each for each in operators if not isinstance(node.op, each)])()

    return change


def _another_comparison(node: ast.Compare) -> Change:
    def change(draw: random.Random) -> None:
        node.ops[0] = draw.choice([each for each in COMPARISONS if not isinstance(node.ops[0], each)])()

    return change


def _another_name(node: ast.Name, names: list[str]) -> Change:
    def change(draw: random.Random) -> None:
        node.id = draw.choice(names)

    return change


def _moved(node: ast.Subscript) -> Change:
    def change(draw: random.Random) -> None:
        node.slice = ast.BinOp(node.slice, ast.Sub(), ast.Constant(1))

    return change


def _left_out(body: list[ast.stmt], statement: ast.stmt) -> Change:
    def change(draw: random.Random) -> None:
        body[body.index(statement)] = ast.Pass()

    return change


def _twice(body: list[ast.stmt], statement: ast.stmt) -> Change:
    def change(draw: random.Random) -> None:
        body.insert(body.index(statement), statement)

    return change


def network_of(mutant: Mutant, load: Callable[[str, Path], Any], path: Path) -> Any:
    """The changed network, entered in the zoo by loading its file."""
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    import networks_zoo  # found only now

    load(mutant.text, path)
    return networks_zoo.Net(networks_zoo._ZOO[mutant.name])
