"""Faults of compiled segments and of later calls, and false alarms: what is committed is whole and meets its goals."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import compiled_mutants
import proof_alarms
import proof_mutants
from compiled_faults import FAULTS, LATER, UNMENDED

RESULT: dict[str, Any] = json.loads(compiled_mutants.RESULT.read_text())
ALARMS: dict[str, Any] = json.loads(proof_alarms.RESULT.read_text())["rows"]
README = (compiled_mutants.HERE / "README.md").read_text()


@pytest.mark.parametrize("name", [*FAULTS, *LATER])
def test_a_fault_is_an_edit_that_can_be_made(name: str) -> None:
    fault = FAULTS.get(name) or LATER[name]
    function = proof_mutants.function_of(fault.where)
    before = function.__code__
    with proof_mutants.switched_on(fault):
        assert function.__code__ is not before
    assert function.__code__ is before


@pytest.mark.parametrize("part", compiled_mutants.PARTS)
def test_what_is_committed_is_of_these_faults_and_meets_the_goal(part: str) -> None:
    faults = RESULT[part]["faults"]
    assert list(faults) == compiled_mutants.FAULTS_OF[part]
    networks = {network for found in faults.values() for network in found}
    assert networks <= {*compiled_mutants.NETWORKS_OF[part]}
    caught, all_ = proof_mutants.scores(RESULT[part])
    shown = [each for each in faults.values() if {"caught", "missed"} & {what for what, _ in each.values()}]
    assert len(shown) >= 10
    assert len(networks) >= 4
    assert caught >= proof_mutants.GOAL * all_
    assert f"{caught} of {all_} pairs of {len(shown)} faults" in " ".join(README.split())


def test_the_known_faults_of_inductor_are_caught() -> None:
    for name in UNMENDED:
        assert {what for what, _ in RESULT["compiled"]["faults"][name].values()} == {"caught"}


def test_the_whole_zoo_was_tried() -> None:
    for dtype in proof_alarms.DTYPES:
        assert set(ALARMS["zoo"][dtype]) == set(proof_alarms.DOORS)
        for door, rows in ALARMS["zoo"][dtype].items():
            assert set(rows) >= set(proof_alarms.names("zoo", door))


@pytest.mark.parametrize("of", ALARMS)
def test_no_network_is_blamed(of: str) -> None:
    found = Counter[str]()
    for doors in ALARMS[of].values():
        for rows in doors.values():
            found += proof_alarms.counts(rows)
    assert not {proof_alarms.ALARM, proof_alarms.DISAGREES, "ended"} & set(found)
    compared = found[proof_alarms.PROVED] + found[proof_alarms.VALUES]
    assert f"{of}: {compared} of {found.total()}" in " ".join(README.split())


@pytest.fixture
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_default_dtype")
@pytest.mark.parametrize(("of", "name"), [("zoo", "lif"), ("doors", "two directions"), ("programs", "2")])
def test_a_network_is_proved_at_each_call(of: str, name: str) -> None:
    assert proof_alarms.row(of, "reroll.compile", "float64", name) == ["proved", ""]
