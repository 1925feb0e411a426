"""The benchmark of first epochs: its networks, the calls of a process, and the figures that it shows."""

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def epoch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("epoch")


@pytest.mark.campaign
def test_calls_of_a_process(epoch: Any) -> None:
    """The larger batch and training take longer, which says that both are what the plan asks for."""
    plan = [[(True, True), (True, True), (False, True), (False, False)]]
    found = epoch.row("nn.LSTM", "eager", plan)
    (calls,) = found["calls_s"]
    cpu = [each[1] for each in calls]
    assert cpu[1] > cpu[2] > cpu[3] > 0
    assert found["cpu_s"] >= sum(cpu)
    assert found["loss"] > 0


@pytest.mark.parametrize("name", ["recurrent LIF (D2r)", "nn.LSTM", "GRU language model", "GPT 12"])
def test_a_smaller_batch_is_two_thirds(name: str, epoch: Any) -> None:
    script = epoch.SCRIPTS[name]
    network = script.make()
    pairs = zip(network.inputs, epoch.smaller(network.inputs, script.dims), script.dims, strict=True)
    for whole, smaller, dim in pairs:
        assert smaller.shape[dim] == 2 * whole.shape[dim] // 3
        assert torch.equal(smaller, whole.narrow(dim, 0, smaller.shape[dim]))


def test_figures_of_a_row(epoch: Any) -> None:
    def process(*seconds: float) -> dict[str, Any]:
        return {"calls_s": [[(2 * each, each) for each in seconds]], "cpu_s": 9.0}

    rows = {
        "eager": {"cold": process(1, 1), "next": process(1, 1), "200 steps": process(4)},
        "reroll": {"cold": process(5, 1), "next": process(2, 1), "200 steps": process(3)},
        "torch.compile": {"cold": {"no answer within_s": epoch.LIMIT}},
        epoch.JAX: {"cold": {"error": "none"}, "200 steps": process(2)},
    }
    assert epoch.figures(rows, "reroll", "cpu") == ["5.00", "6.00", "9.0", "1.00", "0.75"]
    assert epoch.figures(rows, "reroll", "wall") == ["10.00", "12.00", "9.0", "2.00", "0.75"]
    assert epoch.figures(rows, "torch.compile", "cpu")[0] == f"none in {epoch.LIMIT} s"
    assert epoch.figures(rows, epoch.JAX, "cpu") == ["error", "-", "-", "-", "0.50"]
    shown = io.StringIO()
    epoch.show({"a network": rows}, "cpu", Console(file=shown, width=130))
    assert all(f" {way} " in shown.getvalue() for way in rows)


def test_networks_in_jax_have_the_losses_of_torch(epoch: Any, tmp_path: Path) -> None:
    """After training on both sizes of the batch."""
    pytest.importorskip("jax")
    plan = [[(True, True), (False, True), (False, False)]]
    for name, script in epoch.SCRIPTS.items():
        if script.jax:
            epoch.given_to_jax(name, plan, tmp_path)
            command = [sys.executable, str(FOLDER / "epoch_jax.py"), str(tmp_path), script.jax]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            assert told["loss"] == pytest.approx(epoch.row(name, "eager", plan)["loss"], rel=1e-5), name
