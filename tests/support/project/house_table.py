"""What ``make house`` prints: figures of the files that are reported and not enforced, and folders by their entries.

A file is cut where its subject ends, never to please a number.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sources import PACKAGES, ROOT, Function, Source, imported, sources, within

LONG, SHORT, PARAMETERS, IMPORTS = 400, 40, 6, 12
MEDIAN = "half of the files have at most {} lines, nine in ten at most {}"


@dataclass(frozen=True)
class Figures:
    """Of a file: its lines, the modules of reroll that it imports, the most parameters and code lines of a function."""

    path: str
    lines: int
    imports: int
    parameters: int
    longest: int

    @property
    def told(self) -> bool:
        """Whether one of them is beyond what is usual."""
        short = self.lines < SHORT and not self.path.startswith("passes/") and not self.path.endswith("__.py")
        return self.lines > LONG or short or self.imports > IMPORTS or self.parameters > PARAMETERS


def figures(source: Source) -> Figures:
    """The figures of a file."""
    modules = {
        name.rpartition(".")[0] if isinstance(node, ast.ImportFrom) else name
        for node in source.nodes
        for name in imported(node)
        if within(name, ("reroll",))
    }
    functions = list(source.functions)
    return Figures(
        source.path,
        source.text.count("\n"),
        len(modules),
        max(map(_parameters, functions), default=0),
        max(map(source.code_lines, functions), default=0),
    )


def _parameters(function: Function) -> int:
    found = [*function.args.posonlyargs, *function.args.args]
    own = found[1:] if found and found[0].arg in ("self", "cls") else found
    return len(own) + len(function.args.kwonlyargs)


def _shown(value: int, usual: bool) -> str:
    return str(value) if usual else f"[bold]{value}[/bold]"


def main() -> None:
    """Print the table."""
    console, found = Console(width=120), [figures(each) for each in sources() if each.folder in PACKAGES]
    table = Table("file", "lines", "imports of reroll", "parameters", "longest function")
    for each in sorted((each for each in found if each.told), key=lambda each: each.path):
        table.add_row(
            each.path,
            _shown(each.lines, SHORT <= each.lines <= LONG),
            _shown(each.imports, each.imports <= IMPORTS),
            _shown(each.parameters, each.parameters <= PARAMETERS),
            str(each.longest),
        )
    console.print(table)
    lines = sorted(each.lines for each in found)
    console.print(f"{len(found)} files, {sum(lines):,} lines;", MEDIAN.format(lines[len(lines) // 2], _at(lines, 0.9)))
    parents = ((ROOT / each.path).parent.relative_to(ROOT).as_posix() for each in found)
    full = ", ".join(f"{folder} {entries}" for folder, entries in Counter(parents).most_common(6))
    console.print(f"most modules: {full}")


def _at(values: list[int], share: float) -> int:
    return values[min(int(share * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main()
