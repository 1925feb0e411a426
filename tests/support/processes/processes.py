"""Scripts that several processes run together, on this machine alone."""

import os
import subprocess
import sys
from pathlib import Path

PROCESSES = 2


def torchrun(script: Path, *arguments: str, seconds: float = 400.0) -> subprocess.CompletedProcess[str]:
    """What ``PROCESSES`` processes of a script ended with; they find what this one imports, and the script's folder.

    seconds: how long they may wait for each other. Raises TimeoutExpired.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    paths = os.pathsep.join([str(script.parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=seconds,
    )
