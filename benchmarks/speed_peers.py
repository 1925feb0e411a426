"""Contenders of ``speed.py`` that are not torch's: a process of ``speed_jax.py``, asked for one step at a time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Step
from speed_networks import Gated, Network
from torch import Tensor


class Peers:
    """Inside, the process runs on the cores of this one. Without an interpreter there are no peers.

    ``ways``: the only ones, if any are named. ``told``: what is measured once, by name, or the ``error`` there.
    ``steps``: training steps of the others that give their seconds by ``clock``: "cpu", or "wall" where work is left to
    a device.
    """

    def __init__(
        self,
        python: str | None,
        network: Network,
        x: Tensor,
        expected: list[Tensor],
        clock: str = "cpu",
        ways: Sequence[str] = (),
    ) -> None:
        self.python, self.network, self.x, self.expected, self.clock = python, network, x, expected, clock
        self.ways = ways
        self.told: dict[str, dict[str, Any]] = {}
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Peers:
        if self.python is None:
            return self
        script = str(Path(__file__).with_name("speed_jax.py"))
        with tempfile.TemporaryDirectory(prefix="reroll-bench-") as folder:
            file = Path(folder) / "network.npz"
            np.savez(file, **self._arrays())
            kind = type(self.network.cell if isinstance(self.network, Gated) else self.network).__name__
            command = [self.python, script, str(file), kind, self.clock, *self.ways]
            # On a card: its memory is shared with this process, and products are in float32, as ours are, not in TF32.
            shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest", **os.environ}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=shared
            )
            while line := self._line().strip():
                told = json.loads(line)
                self.told[told.pop("name")] = told
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.communicate()

    @property
    def steps(self) -> dict[str, Step]:
        """Training steps by name."""
        works = [name for name, told in self.told.items() if "error" not in told]
        return {name: lambda name=name: self._run(name) for name in works}  # type: ignore[misc]

    def _run(self, name: str) -> float:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.python} ended")
        return line

    def _arrays(self) -> dict[str, Any]:
        """Inputs, first states, parameters and their gradients."""
        named = list(self.network.named_parameters())
        states = enumerate(self.network.initial(self.x))
        return {
            "x": self.x.numpy(force=True),
            **{f"state.{number}": state.numpy(force=True) for number, state in states},
            **{f"value.{name}": value.numpy(force=True) for name, value in named},
            **{f"grad.{name}": grad.numpy(force=True) for (name, _), grad in zip(named, self.expected, strict=True)},
        }
