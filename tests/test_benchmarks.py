"""The benchmark runs, at a size that shows nothing but that."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = ["--steps", "14", "--batch", "2", "--neurons", "8", "--lowerings", "eager", "--rounds", "1"]
LONG = ["--long-steps", "20", "--short-steps", "16"]


def test_benchmark_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    figures = importlib.import_module("figures")
    out = tmp_path / "figures.json"
    found = figures.main([*SMALL, *LONG, "--only", "memory,time,long", "--out", str(out)])
    written = json.loads(out.read_text())
    assert set(written["memory"]) == set(written["time"]) == set(found["memory"])
    assert all(each["local_peak_bytes"] > 0 and each["relative_error"] < 1e-5 for each in written["memory"].values())
    assert written["long"]["carries_to_remote"] > 0
    assert written["long"]["relative_error"] < 1e-5
    assert {"local peak of standard, eager, MiB", "largest relative error of a gradient"} <= {
        g[0] for g in written["goals"]
    }


def test_table_of_networks_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    table = importlib.import_module("networks_table")
    out = tmp_path / "networks.json"
    command = ["--fast", "--only", "torch-gru_cell", "--out", str(out)]
    table.main(command)
    written = json.loads(out.read_text())
    row = written["eager"]["torch-gru_cell"]
    assert table.refusal(row) is None
    for schedule in ("standard", "double"):
        assert row[schedule]["relative_error"] < 1e-12
        assert row[schedule]["local_peak_bytes"][schedule] < row[schedule]["local_peak_bytes"]["eager"]
    assert row["standard"]["compiled_after_ten_lengths"] == row["standard"]["compiled_after_first_calls"][0]
    assert table.main(command) == written  # what is there is not measured again


def test_costs_over_lengths_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    lengths = importlib.import_module("lengths")
    out = tmp_path / "lengths.json"
    small = ["--lowering", "eager", "--neurons", "8", "--batch", "2", "--networks", "network D2r"]
    small += ["--compile-steps", "20", "40", "--long-steps", "60", "--short-steps", "20", "--long-batch", "2"]
    lengths.main([*small, "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["compile, network D2r"]["long"]["first_s"] > 0
    assert written["long"]["double_at_plain_steps"]["relative_error"] < 1e-5
    assert written["long"]["step_cpu_s"] > 0
