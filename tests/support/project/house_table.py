"""What ``make house`` prints: figures of files, functions and folders. None of them is enforced.

A file, a function or a folder is cut where its subject ends, never to please a number; and merged where a part says no
more than the whole. A *private function with one caller* is one that a cut has made, as a rule: its name says more than
its body, or its body belongs where it is called.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sources import PACKAGES, ROOT, Function, Source, imported, sources, within

LONG, SHORT, PARAMETERS, IMPORTS, FUNCTION, ENTRIES = 600, 40, 6, 12, 60, 20
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
        wide = self.imports > IMPORTS or self.parameters > PARAMETERS
        return self.lines > LONG or short or wide or self.longest > FUNCTION


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


def called_once(source: Source) -> tuple[int, int]:
    """Private functions of a file, and those of them whose name stands there once but for the definition."""
    private = [each.name for each in source.functions if each.name.startswith("_") and not each.name.endswith("__")]
    named = Counter[str]()
    for node in source.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            named[node.id if isinstance(node, ast.Name) else node.attr] += 1
    return len(private), sum(named[name] == 1 for name in private)


def full_folders() -> list[tuple[str, int]]:
    """Folders of the package, the tests and the documentation with many entries, and how many they have."""
    tops = (ROOT / top for top in (*PACKAGES, "tests", "demos", "docs", "benchmarks"))
    folders = (
        path for top in tops for path in (top, *top.rglob("*")) if path.is_dir() and "__pycache__" not in str(path)
    )
    entries = {path: sum(each.name != "__pycache__" for each in path.iterdir()) for path in folders}
    return sorted((path.relative_to(ROOT).as_posix(), count) for path, count in entries.items() if count > ENTRIES)


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
            _shown(each.longest, each.longest <= FUNCTION),
        )
    console.print(table)
    lines = sorted(each.lines for each in found)
    console.print(f"{len(found)} files, {sum(lines):,} lines;", MEDIAN.format(lines[len(lines) // 2], _at(lines, 0.9)))
    counts = [called_once(each) for each in sources() if each.folder in PACKAGES]
    private, once = (sum(column) for column in zip(*counts, strict=True))
    console.print(f"{once:,} of {private:,} private functions ({once / private:.0%}) have one caller")
    console.print(f"folders of more than {ENTRIES}: {', '.join(f'{name} {count}' for name, count in full_folders())}")


def _at(values: list[int], share: float) -> int:
    return values[min(int(share * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main()
