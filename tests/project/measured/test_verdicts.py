"""Golden verdicts: what is committed is complete and right, what is made now not worse, and what is worse is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import verdicts

from networks_zoo import load

RESULT: dict[str, Any] = verdicts.read(verdicts.RESULT)
PARTS: dict[str, dict[str, Any]] = RESULT["parts"]
LARGEST = 1e-9  # of an error, in float64
OPEN: dict[str, set[str]] = {}
"""Rows of a part that are known to be wrong, of defects that NOTES.md tells of."""
SOME = ("lif 9", "gru_cell 21", "bidirectional 5", "stochastic_spike 13")
ROW = {"verdict": "rolled", "loops": [9, 4], "carries": [96, 8], "error": 1e-15, "text": "a"}


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_every_network_is_there_at_every_length() -> None:
    assert set(PARTS["zoo"]) >= {f"{name} {steps}" for name in load() for steps in verdicts.LENGTHS}
    assert set(PARTS["doors"]) == set(verdicts.names("doors"))
    assert {part: len(PARTS[part]) for part in verdicts.SEEDS} == verdicts.SEEDS
    assert "benchmarks/verdicts.py" in RESULT["made"]["command"]


@pytest.mark.parametrize("part", verdicts.PARTS)
def test_nothing_that_is_there_is_a_defect(part: str) -> None:
    defects = {name for name, row in PARTS[part].items() if row["verdict"] not in verdicts.BEST_FIRST}
    inexact = {name: row for name, row in PARTS[part].items() if not row.get("short") and row.get("error", 0) > LARGEST}
    assert (defects, inexact) == (OPEN.get(part, set()), {})
    refused = [row for row in PARTS[part].values() if row["verdict"] == "refused"]
    assert all(row["raised"] and row["why"] for row in refused)


def test_all_networks_of_people_are_rolled() -> None:
    assert {name for name, row in PARTS["doors"].items() if row["verdict"] != "rolled"} == set()
    text = f"trains all [{len(PARTS['doors'])} networks](docs/background/doors.md) of people's libraries"
    assert text in (verdicts.HERE.parent / "README.md").read_text()


def test_all_networks_of_the_tests_but_two_are_rolled() -> None:
    left = {name.split()[0] for name, row in PARTS["zoo"].items() if row["verdict"] != "rolled" and _steps(name) >= 13}
    assert left == {"vmapped", "unused_param_output"}  # a transform, and no recurrence
    networks = len({name.split()[0] for name in PARTS["zoo"]})
    text = f"Of the {networks} networks of the tests it rolls {networks - len(left)} from 13 steps on"
    assert text in (verdicts.HERE.parent / "docs" / "background" / "doors.md").read_text()


def _steps(name: str) -> int:
    return int(name.split()[1])


@pytest.mark.parametrize("name", SOME)
def test_a_verdict_of_now_is_not_worse(name: str) -> None:
    assert verdicts.worse(PARTS["zoo"][name], verdicts.row("zoo", name)) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"verdict": "refused", "why": "No."}, "rolled -> refused No."),
        ({"verdict": "wrong", "why": "off"}, "rolled -> wrong off"),
        ({"loops": [9]}, "loops of [9] steps, before [9, 4]"),
        ({"carries": [96, 16]}, "carries of [96, 16] bytes, before [96, 8]"),
        ({"error": 1e-9}, "error 1e-09, before 1e-15"),
        ({"error": 1e-13}, ""),  # rounding of another machine
        ({"verdict": "wrong", "text": "b"}, ""),  # another program
        ({"loops": [10, 4], "carries": [96], "error": 0.0}, ""),
    ],
)
def test_what_is_worse_is_told(changed: dict[str, Any], told: str) -> None:
    assert verdicts.worse(ROW, {**ROW, **changed}) == told


def test_another_class_of_error_is_told() -> None:
    before = {"verdict": "refused", "raised": "LengthError"}
    assert "RuntimeError" in verdicts.worse(before, {**before, "raised": "RuntimeError"})


def test_a_run_goes_on_and_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"lif 9": PARTS["zoo"]["lif 9"]}
    better = {"lif 9": {**good["lif 9"], "loops": [30]}}
    out, made = tmp_path / "out.json", RESULT["made"]
    monkeypatch.setattr(verdicts, "made_apart", lambda part, wanted, _: ((name, good[name]) for name in wanted))
    for against, count in ((good, 0), (better, 1)):
        before = tmp_path / "before.json"
        verdicts.write(before, {"made": made, "parts": {"zoo": against}})
        assert json.loads(before.read_text())["parts"]["zoo"] == against
        monkeypatch.setattr("sys.argv", ["verdicts.py", "--out", str(out), "--against", str(before), "--only", "zoo"])
        assert verdicts.main() == count
    assert verdicts.read(out)["parts"]["zoo"] == good
