"""The rooms: each says at its door what it is for."""

from __future__ import annotations

import ast

import pytest

from sources import ROOT, sources

HEADER = ("In: ", "Out: ", "Nouns: ", "Mind: ")


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
