"""Two processes train together, by DistributedDataParallel and by fully_shard, as one process does."""

import json
from pathlib import Path

import pytest
import torch

from processes import PROCESSES, torchrun

WORKER = Path(__file__).resolve().parents[2] / "support" / "processes" / "distributed_worker.py"


# One case of each kind, for every change; the campaign runs all.
FEW = (
    "compiled inside of DDP",
    "backend around DDP",
    "cut by Dynamo",
    "lengths of each process",
    "compiled around fully_shard",
    "sharded in layers",
    "budgets of each process",
    "blocks of more than a bucket of DDP's",
    "blocks around fully_shard",
    "blocks that are sharded",
    "sharded blocks, added up in float64",
    "sharded blocks that are refused",
    "speaking steps",
    "speaking steps, other lengths",
)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
@pytest.mark.parametrize("cases", [FEW, pytest.param((), marks=pytest.mark.campaign)], ids=["few", "all"])
def test_processes_agree(cases: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "found"
    done = torchrun(WORKER, str(out), *cases)
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(PROCESSES):
        found = json.loads(Path(f"{out}.{rank}").read_text())
        wrong = {name: differences for name, differences in found.items() if differences}
        assert not wrong, f"process {rank}: " + "\n".join(f"{name}: {text}" for name, text in wrong.items())
        assert set(found) >= set(FEW)
