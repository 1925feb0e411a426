"""The rooms: no folder is too full to be read at a glance, and each says at its door what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sources import PACKAGES, ROOT, sources

ENTRIES = 12
MORE = {"compiler": 14, "docs": 18}  # README.md links to the pages of docs/ by their names; sections came beside them
FREE = ("tests/networks",)  # a case for each network of others
HEADER = ("In: ", "Out: ", "Nouns: ", "Mind: ")
NO_ENTRY = ("__pycache__", "py.typed")


def folders() -> Iterator[Path]:
    """Every folder of the package, the tests, the demos and the documentation."""
    for top in (*PACKAGES, "tests", "demos", "docs"):
        yield from (path for path in (ROOT / top, *(ROOT / top).rglob("*")) if path.is_dir() and holds(path))


def holds(folder: Path) -> list[Path]:
    """The entries of a folder, without what Python and the demos leave there."""
    if {"__pycache__", "out"} & set(folder.relative_to(ROOT).parts):
        return []
    return [path for path in folder.iterdir() if path.name not in (*NO_ENTRY, "out")]


def cap(name: str) -> int:
    return MORE.get(name, ENTRIES)


def test_folders_are_read_at_a_glance() -> None:
    found = {path.relative_to(ROOT).as_posix(): len(holds(path)) for path in folders()}
    assert not {name: entries for name, entries in found.items() if entries > cap(name) and name not in FREE}


def rooms() -> list[str]:
    """The packages below the three tops, and the places."""
    packages = [source.path for source in sources() if source.module and source.path.endswith("/__init__.py")]
    return [path for path in packages if path not in ("compiler/__init__.py",)]


def header(text: str) -> list[str]:
    """What the header of a room lacks."""
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    told = [line for line in lines if line.startswith(HEADER)]
    missing = [word for word in HEADER if not any(line.startswith(word) for line in told)]
    if not lines or not lines[0].endswith(".") or (len(lines) > 1 and lines[1]):
        missing.append("one line that says what the room does")
    return missing if [line.partition(" ")[0] + " " for line in told] == list(HEADER) else [*missing, "its order"]


@pytest.mark.parametrize("path", rooms())
def test_a_room_says_at_its_door_what_it_is_for(path: str) -> None:
    assert not header((ROOT / path).read_text("utf-8"))


def test_a_header_can_be_wrong() -> None:
    good = '"""Does it.\n\nIn: a\nOut: b\nNouns: c\nMind: d\n"""\n'
    assert not header(good)
    assert header(good.replace("Mind: d\n", ""))
    assert header(good.replace("Does it.", "Does it"))
    assert header(good.replace("In: a\nOut: b\n", "Out: b\nIn: a\n"))
    assert header("")
