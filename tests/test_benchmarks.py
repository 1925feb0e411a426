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
