"""Proofs where several processes train together: each proves its own programs, at calls of its own, and none waits for
what another does not do. A fault in one process or in all ends with a sentence, or eager segments stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import PROCESSES, torchrun

WORKER = Path(__file__).resolve().parents[2] / "support" / "processes" / "proving_worker.py"
SECONDS = 240.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed"),
]


def ended(out: Path, case: str, *faulty: str) -> list[dict[str, Any]]:
    """What each process ended with; none may hang. Empty for one that was ended as another had failed."""
    torchrun(WORKER, str(out / "found"), case, *faulty, seconds=SECONDS)
    files = [out / f"found.{rank}" for rank in range(PROCESSES)]
    return [json.loads(each.read_text()) if each.exists() else {} for each in files]


DOORS = pytest.mark.parametrize(
    "case", ["proofs at other calls", "proofs for every length"], ids=["backend", "compile"]
)


@DOORS
def test_processes_prove_at_calls_of_their_own(case: str, tmp_path: Path) -> None:
    for found in ended(tmp_path, case):
        assert found["differs"] == []
        assert len(found["proved"]) >= 1 + (case == "proofs at other calls") * 2
        assert all(each.startswith("values and gradients are those of torch") for each in found["proved"])


@DOORS
@pytest.mark.parametrize("faulty", [("0",), ("0", "1")], ids=["one", "all"])
def test_a_fault_is_an_error_of_its_process(faulty: tuple[str, ...], case: str, tmp_path: Path) -> None:
    found = ended(tmp_path, case, *faulty)
    for rank in map(int, faulty):
        if found[rank] or len(faulty) == 1:  # the first one that fails has the others ended
            assert found[rank]["error"].startswith("ProofError: The compiled program does not give what torch gives")
    assert any("ProofError" in each.get("error", "") for each in found)
    assert all(not each or "error" in each for each in found)


@pytest.mark.inductor
@pytest.mark.parametrize("faulty", [("0",), pytest.param(("0", "1"), marks=pytest.mark.campaign)], ids=["one", "all"])
def test_compiled_segments_stay_out_where_they_are_wrong(faulty: tuple[str, ...], tmp_path: Path) -> None:
    for rank, found in enumerate(ended(tmp_path, "compiled segments that take over", *faulty)):
        assert found["differs"] == []
        assert len(found["warned"]) == (str(rank) in faulty)
        assert all("go on with eager segments" in each for each in found["warned"])


@pytest.mark.inductor
@pytest.mark.parametrize("faulty", [("0",), pytest.param((), marks=pytest.mark.campaign)], ids=["one", "none"])
def test_trials_of_steps_that_speak_are_judged_together(faulty: tuple[str, ...], tmp_path: Path) -> None:
    for rank, found in enumerate(ended(tmp_path, "speaking steps that take over", *faulty)):
        assert found["differs"] == []
        assert len(found["warned"]) == bool(faulty)
        assert all("cannot take over" in each for each in found["warned"])
        assert not faulty or ("in another process" in found["warned"][0]) == (str(rank) not in faulty)


@pytest.mark.inductor
def test_compiled_steps_that_send_what_they_carry(tmp_path: Path) -> None:
    assert [found["differs"] for found in ended(tmp_path, "compiled speaking steps")] == [[], []]
