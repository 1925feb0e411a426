"""What is public: the names of ``reroll``, the doors, and the page that promises them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import reroll
from reroll import errors
from sources import ROOT

PAGE = (ROOT / "docs" / "background" / "stability.md").read_text("utf-8")


def promised() -> set[str]:
    """The names in the first table of docs/background/stability.md."""
    table = PAGE.split("**Names of `reroll`.**")[1].split("\n\n")[1]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_page_promises_the_public_names() -> None:
    assert promised() == set(reroll.__all__)


def test_every_public_name_is_there_and_listed() -> None:
    assert set(reroll.__all__) <= set(dir(reroll))
    assert all(getattr(reroll, name) is not None for name in reroll.__all__)


def test_every_error_is_public() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert raised <= set(reroll.__all__)
    assert all(getattr(reroll, name) is getattr(errors, name) for name in raised)


@pytest.mark.parametrize("name", ["program", "schedules", "formulas"])
def test_doors_are_attributes(name: str) -> None:
    assert name in dir(reroll)
    assert getattr(reroll, name) is importlib.import_module(f"reroll.{name}")


@pytest.mark.parametrize("name", ["reroll.program", "reroll.schedules"])
def test_a_door_has_what_it_lists(name: str) -> None:
    door = importlib.import_module(name)
    assert all(hasattr(door, each) for each in door.__all__)


def test_names_are_loaded_when_they_are_asked_for() -> None:
    """``import reroll`` loads neither the report nor what compiles; asking leaves Python's random numbers alone."""
    code = (
        "import random, sys; random.seed(1); import reroll; "
        "print(any(name in sys.modules for name in ('rich', 'sympy.core', 'reroll.backends.dynamo.entry'))); "
        "state = random.getstate(); [getattr(reroll, name) for name in reroll.__all__]; "
        "print(random.getstate() == state)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.split() == ["False", "True"]
