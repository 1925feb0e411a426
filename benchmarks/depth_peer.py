"""A contender of ``depth.py`` that is not torch's: a process of ``depth_jax.py``, asked for one step at a time."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

JAX_WAYS = ("JAX scan", "JAX scan, dots", "JAX scan, full remat")


@dataclass(frozen=True, slots=True)
class Peer:
    """A training step in another process, what is measured of it once, and its gradients by names of parameters."""

    told: dict[str, Any]
    gradients: dict[str, Tensor]
    asked: IO[str]
    answered: IO[str]

    def step(self) -> float:
        """A training step there: its CPU seconds."""
        self.asked.write("\n")
        self.asked.flush()
        return float(_line(self.answered))


@contextmanager
def peer(python: str, name: str, way: str, network: nn.Module, example: tuple[Tensor, Tensor]) -> Iterator[Peer]:
    """Inside, the process runs on the cores of this one. ``python`` has jax; ``name`` is a name of ``depth.py``."""
    script = str(Path(__file__).with_name("depth_jax.py"))
    with tempfile.TemporaryDirectory(prefix="reroll-bench-") as folder:
        given: dict[str, Any] = dict(zip(("x", "wanted"), (each.numpy(force=True) for each in example), strict=True))
        given |= {f"value.{each}": value.numpy(force=True) for each, value in network.named_parameters()}
        np.savez(Path(folder) / "given.npz", **given)
        command = [python, script, folder, name, way]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            told = json.loads(_line(process.stdout))
            with np.load(Path(folder) / "found.npz") as file:
                gradients = {each: torch.from_numpy(file[each]) for each in file.files}
            yield Peer(told, gradients, process.stdin, process.stdout)


def _line(answered: IO[str]) -> str:
    if not (line := answered.readline()):
        raise SystemExit("JAX ended; its error stands above.")
    return line
