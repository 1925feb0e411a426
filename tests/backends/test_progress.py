"""What is said where something takes long, and that nothing else comes of it."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
import warnings
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import reroll
import reroll.backends.progress
from reroll.backends.progress import hinting, progress
from reroll.errors import RerollWarning


def test_the_random_numbers_of_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once rich is loaded nothing is put back: another thread may draw meanwhile."""
    monkeypatch.setattr(random, "setstate", mock.Mock(side_effect=AssertionError))
    with progress("compiling"), hinting(lambda: "no", wanted=True):
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


def test_a_hint_is_given_unless_it_is_called_off() -> None:
    short = mock.patch.object(reroll.backends.progress, "LONG", 0.02)
    with short, pytest.warns(RerollWarning, match="is it this"), hinting(lambda: "is it this?", wanted=True):
        busy(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wanted in (True, False):
            with mock.patch.object(reroll.backends.progress, "LONG", 0.05), hinting(lambda: "no", wanted=wanted) as off:
                off()
                busy(0.1)
        with mock.patch.object(reroll.backends.progress, "LONG", 0.2), hinting(lambda: "no", wanted=True):
            time.sleep(0.3)  # others had the machine


def test_a_wrong_time_dim_is_told_while_the_model_is_read() -> None:
    class Slow(nn.Module):
        def forward(self, x_TBH: Tensor) -> Tensor:
            h_BH = x_TBH.new_zeros(x_TBH.shape[1:])
            for x_BH in x_TBH:
                h_BH = torch.tanh(x_BH + h_BH)
            return h_BH

    model = reroll.compile(Slow(), time_dim=1, lowering="eager")
    told = r"time_dim names dimension 1 of \[30, 4, 3\]"
    short = mock.patch.object(reroll.backends.progress, "LONG", 0.001)
    x_TBH = torch.randn(30, 4, 3, requires_grad=True)
    with short, pytest.warns(RerollWarning, match=told):
        y_BH = model(x_TBH)
    torch.testing.assert_close(y_BH, Slow()(x_TBH))


@pytest.mark.parametrize(
    "compiled",
    [
        "torch.compile(loop, backend=backend, options=dict(lowering='eager'))",
        "compile(loop, time_dim=0, lowering='eager')",
    ],
)
def test_compiling_leaves_pythons_random_numbers_as_they_are(compiled: str) -> None:
    subprocess.run([sys.executable, "-c", COMPILING.format(compiled=compiled)], check=True)
