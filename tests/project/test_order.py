"""The order of the rooms: what may import what, and what importing the backend loads.

``ORDER`` is the one list of it; CONTRIBUTING.md shows it as a picture. A module imports only from its own room and from
rooms of earlier lines. Rooms of one line do not import each other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from sources import PACKAGES, ROOT, Source, imported, line, sources, within

ORDER = (
    ("errors", "operations", "recurrence"),
    ("words", "graph", "progress"),
    ("capture", "schedules", "segment"),
    ("formulas", "program", "codecs"),
    ("passes", "planning"),
    ("report",),
    ("cache",),
    ("inductor", "tiers"),
    ("processes",),
    ("runtime",),
    ("construct",),
    ("dynamo",),
    ("front",),
    ("measure",),
)
LINE = {room: number for number, rooms in enumerate(ORDER) for room in rooms}

TOPS = ("reroll", "reroll.__main__", "reroll.backends")
"""Modules that stand above all rooms: the public names, the command, the folder of the places."""

TELLING = ("measure", "report")
"""The rooms that may import ``report``: nothing that compiles or runs a model does."""

NOT_LOADED = ("rich", "matplotlib", "reroll.report", "reroll.formulas", "reroll.backends.measure")
"""What importing the backend does not load: it takes time, and a training script never needs it."""


def room(module: str) -> str:
    """The room of a module: the subpackage, or the module itself where it stands in no folder."""
    top = next(top for top in sorted(PACKAGES.values(), key=len, reverse=True) if within(module, (top,)))
    return "passes" if top == "reroll.passes" else module.removeprefix(top).lstrip(".").partition(".")[0]


def imports(source: Source, known: frozenset[str]) -> Iterator[tuple[ast.AST, str]]:
    """(statement, module of the package) of what a source imports, wherever the statement stands."""
    for node in source.nodes:
        for name in imported(node):
            module = name
            while module and module not in known:
                module = module.rpartition(".")[0]
            if module:
                yield node, module


def installed() -> tuple[Source, ...]:
    return tuple(source for source in sources() if source.module and source.module not in TOPS)


def out_of_order(source: Source, known: frozenset[str]) -> Iterator[str]:
    """The imports that run against the order."""
    own = room(source.module)
    for node, module in imports(source, known):
        other = "" if module in TOPS else room(module)
        if other == own or (other == "" and own == "report"):  # the command line calls the public names
            continue
        if not other or LINE[other] >= LINE[own] or (other == "report" and own not in TELLING):
            yield f"{source.path}:{line(node)}: {own} imports {module}"


def circles(given: tuple[Source, ...]) -> list[str]:
    """A circle of modules that import each other, if there is one; types count, but for those of ``report``."""
    known = frozenset(source.module for source in given)
    graph: Mapping[str, set[str]] = {
        source.module: {
            module
            for node, module in imports(source, known)
            if module != source.module and not (room(source.module) == "report" and id(node) in source.for_types)
        }
        for source in given
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_its_place() -> None:
    assert {room(source.module) for source in installed()} == set(LINE)


def test_imports_keep_the_order() -> None:
    known = frozenset(source.module for source in sources() if source.module)
    wrong = [text for source in installed() for text in out_of_order(source, known)]
    assert not wrong, "\n".join(["", *wrong])


def test_there_are_no_circles() -> None:
    assert not circles(installed())


KNOWN = frozenset({"reroll", "reroll.graph.a", "reroll.report.a", "reroll.backends.tiers.a", "reroll.backends.front.a"})


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("compiler/report/a.py", "import reroll.graph.a\n", "import reroll.backends.tiers.a\n"),
        ("backends/tiers/b.py", "from reroll.backends.tiers import a\n", "from reroll.report.a import b\n"),
        ("backends/front/a.py", "from reroll.backends.tiers.a import b\n", "import reroll\n"),
        ("backends/tiers/a.py", "import torch\n", "def f():\n    import reroll.backends.front.a\n"),
        ("passes/a.py", "from reroll.graph.a import b\n", "if TYPE_CHECKING:\n    import reroll.report.a\n"),
    ],
)
def test_the_order_can_be_broken(path: str, good: str, bad: str) -> None:
    assert not list(out_of_order(Source(path, good), KNOWN))
    assert list(out_of_order(Source(path, bad), KNOWN))


def test_a_circle_is_found() -> None:
    one, other = "from reroll.graph.b import c\n", "def f():\n    from reroll.graph.a import g\n"
    there = (Source("compiler/graph/a.py", one), Source("compiler/graph/b.py", other))
    assert set(circles(there)) == {"reroll.graph.a", "reroll.graph.b"}
    for_types = Source("compiler/report/b.py", "if TYPE_CHECKING:\n    from reroll.report.a import c\n")
    assert not circles((Source("compiler/report/a.py", "from reroll.report.b import c\n"), for_types))


def picture() -> list[tuple[str, ...]]:
    """The rooms of each line of the picture in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("### The order of the rooms")[1].split("```")[1]
    shown = ([word.strip() for word in re.split(r"\s{2,}|-+", row)] for row in text.splitlines())
    rows = (tuple(word for word in row if word in LINE) for row in shown)
    return [row for row in rows if row]


def test_the_picture_shows_the_order() -> None:
    assert [set(row) for row in picture()] == [set(row) for row in ORDER]


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", ["reroll", "reroll.program", "reroll.schedules", "reroll.formulas", "reroll.passes"])
def test_a_door_opens_first(door: str) -> None:
    """Each can be imported before anything else of reroll."""
    subprocess.run([sys.executable, "-c", f"import {door}"], check=True, cwd=ROOT.parent)


def test_importing_the_backend_loads_nothing_that_only_tells() -> None:
    code = "import reroll.backends.dynamo, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT.parent)
    loaded = set(done.stdout.split())
    assert "reroll.backends.dynamo.entry" in loaded
    assert not [name for name in loaded if within(name, NOT_LOADED)]
