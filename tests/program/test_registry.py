"""Names of one kind: taken once, but for a notebook's cell that is run again; unknown ones name the nearest."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from reroll.errors import OptionError, PassError
from reroll.words.registry import Registry


@dataclass(frozen=True)
class Colour:
    name: str
    shade: int = 0


def cell() -> None:
    """Stands for what a value is made of."""


def test_a_name_is_taken_once_but_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    colours: Registry[Colour] = Registry("colour", PassError)
    colours.add(Colour("red"), cell)
    with pytest.raises(PassError, match=r"Colour name 'red' of .*:cell is taken by .*:cell\. Choose another name"):
        colours.add(Colour("red", 1), cell)
    monkeypatch.setattr(cell, "__module__", "__main__")
    with pytest.raises(PassError, match=r"of __main__:cell is taken"):
        colours.add(Colour("red", 1), cell)
    colours.add(Colour("blue", 1), cell)
    colours.add(Colour("blue", 2), cell)
    assert colours.find("blue").shade == 2
    assert colours.names() == ("red", "blue")
    assert colours.origin("blue") == "__main__:cell"
    assert "blue" in colours
    assert "green" not in colours


def test_an_unknown_name_is_a_sentence() -> None:
    colours: Registry[Colour] = Registry("colour", PassError, unknown=OptionError)
    with pytest.raises(OptionError, match=r"There is no colour 'red'\. Valid are: \."):
        colours.find("red")
    with pytest.raises(OptionError, match=r"There is no colour \['red'\]"):
        colours.find(["red"])  # type: ignore[arg-type]  # what users write
    colours.add(Colour("green"), cell)
    with pytest.raises(OptionError, match=r"no colour 'gren'\. Did you mean 'green'\? Valid are: green\."):
        colours.find("gren")
