"""What the log says of a compilation, and what torch's own trace keeps of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import reroll

TRAIN = """
import torch, reroll
from torch import nn

class Sums(nn.Module):
    def forward(self, x):
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.tanh(h + x[t])
        return h

x = torch.randn(20, 2, 3, requires_grad=True)
fast = reroll.compile(Sums(), schedule="standard", chunk=4, lowering="eager")
fast(x).sum().backward()
reroll.explain(fast, x)
"""


class Sums(nn.Module):
    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(h_BI + x_TBI[t])
        return h_BI


def told(tmp_path: Path, **environment: str) -> str:
    """What a process that trains writes to its error stream."""
    command = [sys.executable, "-c", TRAIN]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_line_for_each_loop(caplog: pytest.LogCaptureFixture) -> None:
    """What was found and chosen, at INFO; what was tried, at DEBUG."""
    x = torch.randn(20, 2, 3, requires_grad=True)
    fast = reroll.compile(Sums(), schedule="standard", chunk=4, lowering="eager")
    with caplog.at_level(logging.DEBUG, logger="reroll"):
        fast(x).sum().backward()
    line, proved = [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]
    assert "h_BI = torch.tanh(h_BI + x_TBI[t]): 20 steps, standard (segment 4, chunk 4), " in line
    assert line.endswith(("bytes predicted", "B predicted"))
    assert proved.startswith("proved at ")
    assert any("compiling segments of 4" in each.getMessage() for each in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="reroll"):
        fast(x).sum().backward()
    assert not caplog.records  # nothing is said of a call that decides nothing


def test_no_loop_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="reroll"), pytest.warns(reroll.RerollWarning):
        torch.compile(nn.Linear(3, 3), backend="reroll")(torch.randn(2, 3))
    assert [each.getMessage()[:9] for each in caplog.records] == ["no loop: "]


@pytest.mark.slow
def test_torch_logs_show_it(tmp_path: Path) -> None:
    assert "20 steps, standard (segment 4, chunk 4)" in told(tmp_path, TORCH_LOGS="+reroll")
    assert "20 steps" not in told(tmp_path)


@pytest.mark.slow
def test_torch_trace_keeps_artifacts(tmp_path: Path) -> None:
    """The step, the program and the plan of a loop, as a graph is compiled, and the report that was asked for."""
    told(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (log,) = (tmp_path / "trace").glob("*.log")
    kept = dict[str, str]()
    lines = log.read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        if '"artifact": {"name": "reroll' in line:
            name = json.loads(line[line.index("{") :])["artifact"]["name"]
            body = number + 1
            while body < len(lines) and lines[body].startswith("\t"):
                kept[name] = kept.get(name, "") + lines[body][1:] + "\n"
                body += 1
    assert kept.keys() == {*(f"reroll_recurrence_0_{each}" for each in ("step", "program", "plan")), "reroll_report"}
    assert "torch.tanh" in kept["reroll_recurrence_0_step"]
    assert "backward" in kept["reroll_recurrence_0_program"]
    plan = json.loads(kept["reroll_recurrence_0_plan"])
    assert (plan["steps"], plan["schedule"]) == (20, "standard (segment 4, chunk 4)")
    assert "schedule" in kept["reroll_report"]
