"""The mutation run of proofs: its faults are there, and what is committed is of these and meets its goal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import proof_mutants
from proof_faults import FAULTS, Fault
from proof_networks import NETWORKS

RESULT: dict[str, Any] = json.loads(proof_mutants.RESULT.read_text())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_edit_that_can_be_made(name: str) -> None:
    function = proof_mutants.function_of(FAULTS[name].where)
    before = function.__code__
    with proof_mutants.switched_on(FAULTS[name]):
        assert function.__code__ is not before
    assert function.__code__ is before


def test_an_edit_of_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="0 times 'nowhere'"):
        proof_mutants.edited(Fault("segment.trace:time_slice", "nowhere", ""))


def test_what_is_committed_is_of_these_faults_and_meets_the_goal() -> None:
    assert list(RESULT["faults"]) == list(FAULTS)
    assert {network for found in RESULT["faults"].values() for network in found} <= {*NETWORKS}
    shown = [
        name for name, found in RESULT["faults"].items() if {"caught", "missed"} & {what for what, _ in found.values()}
    ]
    caught, all_ = proof_mutants.scores(RESULT)
    assert len(shown) >= 60
    assert len(NETWORKS) >= 20
    assert caught >= proof_mutants.GOAL * all_


def test_a_fault_is_caught_and_right_code_is_not() -> None:
    with proof_mutants.quietly(), proof_mutants.walks.kept():
        trained = proof_mutants.Trained(NETWORKS["weights of steps"])
        assert trained.outcome() == (proof_mutants.SAME, "")
        with proof_mutants.switched_on(FAULTS["a weight of one step has the gradient of another"]):
            what, said = trained.outcome()
        assert what == proof_mutants.CAUGHT
        assert said.startswith("ProofError: The compiled program does not give what torch gives")
    assert torch.is_grad_enabled()
