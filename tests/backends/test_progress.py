"""What is said where something takes long, and that nothing else comes of it."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
from unittest import mock

import pytest
import rich.console  # noqa: F401  # which draws a random number when it is loaded

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
assert random.getstate() == state
assert "rich" not in sys.modules
"""
SHOWING = """
import random, sys, time
from unittest import mock
import reroll.backends.progress as told

random.seed(0)
state = random.getstate()
with mock.patch.object(told, "PATIENCE", 0.01), mock.patch.object(sys.stderr, "isatty", lambda: True, create=True):
    with told.progress("compiling"):
        time.sleep(1)
assert random.getstate() == state
assert "rich" in sys.modules
"""


class Stream(io.StringIO):
    """What is shown, on a terminal or elsewhere."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def busy(seconds: float) -> None:
    """Take CPU time, and leave other threads some."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1_000))
    time.sleep(0.1)


def shown(seconds: float, *, terminal: bool, work: bool = False) -> str:
    stream = Stream(terminal=terminal)
    patience = mock.patch.multiple(reroll.backends.progress, PATIENCE=0.01, QUIET=0.1)
    with patience, mock.patch.object(sys, "stderr", stream), progress("compiling x[t]"):
        (busy if work else time.sleep)(seconds)
    return stream.getvalue()


def test_a_long_compilation_says_so() -> None:
    assert "compiling x[t]" in shown(0.3, terminal=True)
    assert not shown(0.0, terminal=True)
    assert shown(0.4, terminal=False, work=True) == "reroll: compiling x[t]\n"
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


def test_a_spinner_leaves_pythons_random_numbers_as_they_are() -> None:
    subprocess.run([sys.executable, "-c", SHOWING], check=True)
