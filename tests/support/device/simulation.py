"""Tests on a simulated device: values of the CPU are its own, and tiers move them as those of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from reroll.backends.codecs import words
from reroll.backends.codecs.codec import Encoded, encode
from reroll.backends.runtime import recordings as graphs
from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.run import Run
from reroll.backends.runtime.values import Carry, Kept
from reroll.backends.tiers import device as streams
from reroll.backends.tiers import disk
from reroll.backends.tiers.device import device_of
from reroll.backends.tiers.host import HostTier
from reroll.backends.tiers.tier import payloads
from reroll.backends.tiers.transfers import transfers_of
from simulated import SimulatedDevice

CPU = torch.device("cpu")


@contextmanager
def simulating(**described: Any) -> Iterator[SimulatedDevice]:
    """Let the CPU be a simulated device inside. Raises Race where memory is used while it may be copied.

    What was compiled for another device is forgotten.
    """
    torch.compiler.reset()
    with _being(SimulatedDevice(**described)) as device:
        yield device
        gc.collect()
    torch.compiler.reset()


@contextmanager
def _being(device: SimulatedDevice) -> Iterator[SimulatedDevice]:
    played, views = Run._play, disk._views

    def play(run: Run, instruction: Any) -> None:
        device.computed()
        played(run, instruction)
        kept = run.values.get(instruction.node)
        if isinstance(kept, Kept):
            device.used(payloads(kept.tensors))

    def touching(values: Any) -> Any:
        parts: list[Encoded] = list(values)
        device.touched(payloads(parts))
        return views(parts)

    _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streams.KINDS, "cpu", lambda _: device)
        patch.setattr(Run, "_play", play)
        patch.setattr(disk, "_views", touching)
        patch.setattr(words, "HOST", "")  # codecs do as on a device
        try:
            yield device
            leaving = [part for _, _, sources in transfers_of(CPU)._leaving for part in sources]
            device.forbid_unjoined(leaving)
        finally:
            _forget()


def _forget() -> None:
    device_of.cache_clear()
    graphs._turns_of.cache_clear()
    transfers_of.cache_clear()


class DryRun(Run):
    """Plays a program on carries of a few numbers, those of their step, without its segments."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.loop = executable, executable.recurrence.name
        self.values, self.register, self.last = {}, None, Carry(())
        self.origin, self.keep = 0, False

    def played(self) -> None:
        first = self.executable.program.graph.find_nodes(op="placeholder")[0]
        self.register = first, self._made(0)
        for instruction in self.executable.instructions.forward:
            self._play(instruction)
        self.values[self.executable.instructions.forward[-1].node], self.register = [], None
        for instruction in self.executable.instructions.backward:
            self._play(instruction)

    def _made(self, step: int) -> Carry:
        return Carry((torch.full((3,), float(step)), torch.full((2,), float(step))))

    def _run(self, source: Any, start: int, stop: int, taped: Any) -> Carry:
        carry, self.register = self._carry(source), None
        assert all(bool((value == self.origin + start).all()) for value in carry.tensors), "another step's carry"
        return self._made(self.origin + stop)

    def _random(self, carry: Carry) -> None:
        return None

    def _encoded(self, carry: Carry, codec: tuple[str, ...], *, counted: bool = True) -> tuple[Encoded, ...]:
        return tuple(encode(value, "raw", copy=False) for value in carry.tensors)


@contextmanager
def executables() -> Iterator[list[Executable]]:
    """A list that fills with every program made inside."""
    made: list[Executable] = []
    inner = Executable.of

    def noted(*args: Any, **kwargs: Any) -> Executable:
        made.append(inner(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "of", noted)
        yield made


def check_races(executable: Executable) -> int:
    """Play the program of a recurrence on a simulated device, if it will not run on one anyway. Raises Race.

    Gives the number of copies.
    """
    if "cpu" in streams.KINDS:
        return 0
    dry = replace(executable, tiers={name: HostTier() for name in executable.tiers})
    with _being(SimulatedDevice()) as device:
        DryRun(dry).played()
    return device.copies
