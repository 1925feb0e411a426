"""Two processes train together, by DistributedDataParallel and by fully_shard, as one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("distributed_worker.py")
PROCESSES = 2
PATIENCE = 400.0  # seconds after which processes wait for each other in vain


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_processes_agree(tmp_path: Path) -> None:
    out = tmp_path / "found"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    paths = os.pathsep.join([str(WORKER.parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(WORKER), str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(PROCESSES):
        found = json.loads(Path(f"{out}.{rank}").read_text())
        wrong = {name: differences for name, differences in found.items() if differences}
        assert not wrong, f"process {rank}: " + "\n".join(f"{name}: {text}" for name, text in wrong.items())
        assert len(found) > 10
