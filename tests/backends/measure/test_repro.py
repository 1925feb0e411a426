"""The files of a bug report run without the model, and show what is wrong: those of real models."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import external_utils

import reroll
from networks import Half
from reroll.backends.inductor.wrapper_codegen import machine
from reroll.backends.measure import doctor
from reroll.backends.measure.doctor import Finding, self_test
from reroll.errors import RerollError
from reroll.report.cli.commands import main
from reroll.report.repro.files import _share

QUICK: dict[str, Any] = {"lowering": "eager", "segment": 2}


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.slope = slope
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (v,) = ctx.saved_tensors
        return grads[0] / (1 + ctx.slope * v.abs()) ** 2, None


class Lif(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(4, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v = z = x.new_zeros(x.shape[1], 8)
        rows = []
        for t in range(x.shape[0]):
            v = 0.9 * v * (1 - z) + self.taken(x[t]) + self.back(z)
            z = Spike.apply(v - 1.0, 10.0)  # type: ignore[no-untyped-call]
            rows.append(z)
        return torch.stack(rows)


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.steps = nn.Linear(4, 8), 9

    def forward(self, x: Tensor) -> Tensor:
        v = x.new_zeros(x.shape[0], 8)
        for t in range(self.steps):
            v = torch.tanh(0.9 * v + self.taken(x) / (t + 1))
        return v


class Words(nn.Module):
    """Two loops, one of them backwards, with a table and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.then = nn.Embedding(11, 4), nn.GRUCell(4, 8), nn.RNNCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = g = torch.zeros(x.shape[1], 8)
        rows = []
        for t in range(x.shape[0]):
            h = nn.functional.dropout(self.first(self.table(x[t]), h), 0.2)
            rows.append(h)
        states = torch.stack(rows).softmax(0)
        for t in range(x.shape[0] - 1, -1, -1):
            g = self.then(states[t], g)
        return g


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 8)
        for t in range(x.shape[0]):
            h = torch.tanh(self.taken(x[t]) + self.back(h))
        return h


def blocks() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, norm_first=True) for _ in range(4))
    return nn.Sequential(nn.Linear(2, 16), *layers, nn.Linear(16, 1))


def explained(model: nn.Module, *inputs: Tensor, **options: Any) -> reroll.Report:
    return reroll.explain(reroll.compile(model, **QUICK | options), *inputs)


CASES: dict[str, tuple[Callable[[], reroll.Report], int]] = {
    "spikes": (lambda: explained(Lif(), torch.randn(12, 3, 4), schedule="standard"), 1),
    "words": (lambda: explained(Words(), torch.randint(0, 11, (12, 3))), 2),
    "lstm": (lambda: explained(nn.LSTM(3, 8, num_layers=2), torch.randn(12, 2, 3), memory_budget=0.6), 1),
    "static": (lambda: explained(Static(), torch.randn(3, 4)), 1),
    "depth": (lambda: explained(blocks(), torch.randn(5, 3, 2), memory_budget=0.9, segment=None), 1),
}


def played(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a file, and what it prints."""
    capsys.readouterr()
    fresh = mock.patch("torch._dynamo.symbolic_convert._import_module", importlib.import_module)
    with fresh, mock.patch.dict(vars(external_utils)) as names:
        names.pop("__import___main__", None)  # Dynamo would go on with the __main__ of a test before
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(path), run_name="__main__")
    return int(str(left.value.code)), capsys.readouterr().out


class TwoLoops(nn.Module):
    """A loop forward, and one of another size back over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back, self.cell = nn.Linear(3, 5), nn.Linear(5, 5), nn.GRUCell(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, seen, g = x.new_zeros(x.shape[1], 5), [], x.new_zeros(x.shape[1], 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.taken(x[t]) + self.back(h))
            seen.append(h)
        for t in range(x.shape[0]):
            g = self.cell(seen[x.shape[0] - 1 - t], g)
        return g


@pytest.mark.parametrize("budget", [0.5, 30_000])
def test_each_of_several_loops_has_its_share_of_their_budget(
    budget: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = explained(TwoLoops().double(), torch.randn(40, 4, 3, dtype=torch.float64), memory_budget=budget)
    assert len(report.loops) == 2
    report.save(tmp_path)
    code, out = played(tmp_path / "repro.py", capsys)
    assert (code, out.count(": equal to")) == (0, 2), out
    text = (tmp_path / "bench.py").read_text("utf-8")
    for loop in report.loops:
        assert re.search(rf"share = \w+, \w+, {_share(loop)}$", text, re.MULTILINE)


@pytest.mark.variants(3)
@pytest.mark.parametrize("name", CASES)
def test_a_repro_trains_the_loops_as_eager(name: str, tmp_path: Path) -> None:
    made, loops = CASES[name]
    made().write_repro(tmp_path / "repro.py")
    run = [sys.executable, "repro.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (done.returncode, done.stdout.count(": equal to")) == (0, loops), done.stdout + done.stderr
    assert "RerollWarning: Dynamo cannot read" not in done.stderr


def test_a_repro_runs_alone_and_holds_no_values(tmp_path: Path) -> None:
    model = Rnn()
    nn.init.constant_(model.back.weight, 0.123456)
    report = explained(model, torch.full((12, 2, 3), 0.654321))
    report.write_repro(tmp_path / "repro.py")
    text = (tmp_path / "repro.py").read_text("utf-8")
    assert "back_weight" in text
    assert "12345" not in text
    assert "65432" not in text
    run = [sys.executable, "repro.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert f"here: {torch.__version__}" in done.stdout


@pytest.mark.usefixtures("fresh_registry")
def test_a_repro_shows_what_a_wrong_pass_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @reroll.register_pass("wrong", on="step")
    def wrong(step: fx.GraphModule, context: reroll.Context) -> fx.GraphModule:
        for node in step.graph.find_nodes(op="call_function", target=torch.tanh):
            node.target = torch.sigmoid
        step.recompile()
        return step

    report = explained(Rnn(), torch.randn(12, 2, 3), passes=("wrong", *reroll.DEFAULT_PASSES))
    report.write_repro(tmp_path / "repro.py")
    assert "Register wrong here" in (tmp_path / "repro.py").read_text("utf-8")
    code, text = played(tmp_path / "repro.py", capsys)
    assert code == 1
    assert "DIFFERENT" in text


def test_the_stages_and_the_benchmark_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    explained(Lif(), torch.randn(12, 3, 4)).save(tmp_path)
    for stage in ("step", "forward", "backward"):
        assert runpy.run_path(str(tmp_path / f"loop0_{stage}.py"))["results"], stage
    names = {path.name for path in tmp_path.iterdir()}
    assert {"report.txt", "report.html", "report.json", "versions.json", "outer.txt", "repro.py"} <= names
    assert {f"loop0_{each}" for each in ("options.json", "plan.json", "program.txt")} <= names
    monkeypatch.setattr(sys, "argv", ["bench.py", "eager", "reroll"])
    runpy.run_path(str(tmp_path / "bench.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "eager " in text
    assert "reroll " in text
    assert "ms of CPU" in text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "truncate": ({"truncate": 4}, "truncate=4 cuts gradients"),
    "rule": ({"keep": lambda value: True}, "keep has a function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    options, sentence = REFUSED[name]
    report = explained(Rnn(), torch.randn(12, 2, 3), **options)
    with pytest.raises(reroll.UnsupportedError, match=sentence):
        report.write_repro(tmp_path / "repro.py")
    assert not list(tmp_path.iterdir())


def test_an_operation_of_the_users_own_is_refused(tmp_path: Path) -> None:
    @torch.library.custom_op("reprotest::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: 2 * grad)

    class Own(Rnn):
        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], 8)
            for t in range(x.shape[0]):
                h = torch.tanh(self.taken(x[t]) + twice(h))
            return h

    report = explained(Own(), torch.randn(12, 2, 3))
    with pytest.raises(reroll.UnsupportedError, match=r"torch.ops.reprotest.twice"):
        report.write_repro(tmp_path / "repro.py")
    report.save(tmp_path)
    assert "reprotest.twice" in (tmp_path / "repro.py.refused.txt").read_text("utf-8")


def test_the_self_test_can_fail() -> None:
    def broken(model: nn.Module, **_: Any) -> Any:
        raise RerollError("nothing works")

    assert not self_test("eager").todo
    found = self_test("eager", broken)
    assert found.todo
    assert "nothing works" in found.found


@pytest.mark.parametrize("todo", ["", "Install it."])
def test_the_doctor_says_by_its_exit_code_whether_something_is_wrong(
    todo: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reroll, "doctor", lambda: (Finding("disk", "full", todo),), raising=False)
    assert main(["doctor"]) == bool(todo)
    assert todo in capsys.readouterr().out


def test_a_loop_under_autocast_is_compared_as_half_precision_and_its_step_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained(Half(), torch.randn(40, 4, 3)).save(tmp_path)
    code, out = played(tmp_path / "repro.py", capsys)
    assert (code, out.count(": equal to")) == (0, 1), out
    (result,) = runpy.run_path(str(tmp_path / "loop0_step.py"))["results"]
    assert result.dtype == torch.bfloat16


def test_the_doctor_says_that_compiling_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(doctor._switch())
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    (found,) = doctor._switch()
    assert "Unset TORCH_COMPILE_DISABLE" in found.todo


def test_the_doctor_shows_what_was_made_for_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "compiler", lambda: "a compiler")
    for folder, nbytes in ((machine._headers(), 1000), ("headers-of-another", 2000)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.h.gch").write_bytes(bytes(nbytes))
    (found,) = doctor._machine()
    assert "1000 B of compiled headers; for others 1.95 KiB" in str(found)
    shutil.rmtree(tmp_path / "headers-of-another")
    (found,) = doctor._machine()
    assert "others" not in str(found)


def test_the_doctor_sees_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not doctor._folder("traces", tmp_path, "", "Name another.").todo
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert doctor._folder("traces", folder, "", "Name another.").todo == "Name another."
