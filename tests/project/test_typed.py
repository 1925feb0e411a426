"""What an editor and a type checker know of ``reroll``, in the editable install that these tests run in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from reroll.backends.dynamo import reroll as backend
from reroll.backends.front import compile as front
from reroll.planning.options import Options, OptionsDict
from reroll.schedules.named import schedule_names

# Shape letters: T steps, B batch, I inputs. A line that ends in "# refused" is an error, and no other line is.
USED = """
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import reroll
import torch
from torch import Tensor, nn
from typing_extensions import assert_type


class Net(nn.Module):
    hidden: int = 3

    def forward(self, x_TBI: Tensor, scale: float = 1.0) -> Tensor:
        return x_TBI.cumsum(0) * scale


def summed(x_TBI: Tensor, scale: float) -> Tensor:
    return x_TBI.sum(0) * scale


def mean_square(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


net = Net()
fast = reroll.compile(net, schedule="double", memory_budget="1MiB", lowering="eager")
assert_type(fast, Net)
assert_type(fast.hidden, int)
quick = reroll.compile(summed)
assert_type(quick(torch.zeros(3), 2.0), Tensor)
quick(torch.zeros(3), "two")  # refused
halved = reroll.compile(partial(summed, scale=0.5))
assert_type(halved, Callable[..., Tensor])
train = reroll.compile(net, loss=mean_square)
assert_type(train(torch.zeros(3), target=torch.zeros(3)), Tensor)
train(torch.zeros(3))  # refused


@reroll.compile(remote=("host", "disk"))
def decorated(x_TBI: Tensor) -> Tensor:
    return x_TBI.sum(0)


assert_type(decorated(torch.zeros(3)), Tensor)
reroll.compile(net, shedule="double")  # refused
reroll.compile(net, lowering="eagre")  # refused
reroll.compile(net, segment="eight")  # refused
spread: dict[str, Any] = {"segment": 8}
reroll.compile(net, spill_folder=Path("/tmp"), remote=["disk"], passes=["prefetch"], **spread).parameters()
report = reroll.explain(fast, torch.zeros(3))
assert_type(report, reroll.Report)
assert_type(report.text(), str)
assert_type(reroll.measure(lambda: None).local_peak, int)
try:
    fast(torch.zeros(3))
except reroll.BudgetError as error:
    assert_type(error, reroll.BudgetError)
options: reroll.Options = reroll.Options(schedule="auto")
on_disk = reroll.Options(spill_folder=Path("/tmp"), remote=["disk"], passes=["prefetch"])
nothing = reroll.complie  # refused
"""
REFUSED = {number for number, line in enumerate(USED.splitlines(), start=1) if line.endswith("# refused")}


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A user's file, outside of the repository."""
    path = tmp_path / "used.py"
    path.write_text(USED, "utf-8")
    return path


def test_mypy_knows_the_types(used: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", used.name]
    done = subprocess.run(command, cwd=used.parent, capture_output=True, text=True, check=False)
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == REFUSED, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_knows_the_types(used: Path) -> None:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, used.name]
    done = subprocess.run(command, cwd=used.parent, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)["generalDiagnostics"]
    found = {each["range"]["start"]["line"] + 1 for each in told if each["severity"] == "error"}
    assert found == REFUSED, done.stdout


def test_options_and_their_types_agree() -> None:
    declared = typing.get_type_hints(OptionsDict)
    assert list(declared) == [field.name for field in fields(Options)]
    literals = {*typing.get_args(typing.get_args(declared["schedule"])[0])}
    assert literals == {"auto", *schedule_names()}


def test_every_overload_takes_the_same_options() -> None:
    hints = [typing.get_type_hints(each)["options"] for each in typing.get_overloads(front.compile)]
    assert len(hints) == 5
    assert {typing.get_args(hint) for hint in hints} == {(OptionsDict,)}
    assert backend.__annotations__["options"]
