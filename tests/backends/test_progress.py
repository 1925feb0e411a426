"""What is said where something takes long, and that nothing else comes of it."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
from unittest import mock

import pytest
from rich.console import Console

import reroll
import reroll.backends.progress
from reroll.backends.progress import progress


def test_the_random_numbers_of_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once rich is loaded nothing is put back: another thread may draw meanwhile."""
    monkeypatch.setattr(random, "setstate", mock.Mock(side_effect=AssertionError))
    with progress("compiling"):
        pass
    assert reroll.Report is not None


COMPILING = """
import random, sys, torch
from reroll.backends.dynamo.entry import reroll as backend
from reroll.backends.front.compile import compile
assert "rich" not in sys.modules

def loop(x):
    h = torch.zeros_like(x[0])
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
    return h

random.seed(0)
state = random.getstate()
{compiled}(torch.randn(20, 3, requires_grad=True)).sum().backward()
assert "rich" in sys.modules
assert random.getstate() == state
"""


def busy(seconds: float) -> None:
    """Take CPU time, and leave other threads some."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1_000))
    time.sleep(0.1)


def shown(seconds: float, *, terminal: bool, work: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    patience = mock.patch.multiple(reroll.backends.progress, PATIENCE=0.01, QUIET=0.1)
    with patience, progress("compiling", console):
        (busy if work else time.sleep)(seconds)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_long_compilation_says_so() -> None:
    assert "compiling" in shown(0.3, terminal=True)
    assert not shown(0.0, terminal=True)
    assert shown(0.4, terminal=False, work=True) == "reroll: compiling\n"
    assert not shown(0.02, terminal=False, work=True)
    assert not shown(0.4, terminal=False)  # others had the machine


@pytest.mark.parametrize(
    "compiled",
    [
        "torch.compile(loop, backend=backend, options=dict(lowering='eager'))",
        "compile(loop, lowering='eager')",
    ],
)
def test_compiling_leaves_pythons_random_numbers_as_they_are(compiled: str) -> None:
    subprocess.run([sys.executable, "-c", COMPILING.format(compiled=compiled)], check=True)
