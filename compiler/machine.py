"""What a plan must know of a machine: its remote tiers, their capacity, bandwidth and latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MachineTier:
    """A tier of memory outside of the device.

    ``capacity`` in bytes (None: as much as is asked for), ``write`` and ``read`` in bytes a second, ``latency`` in
    seconds for each transfer.
    """

    name: str
    write: float
    read: float
    latency: float = 0.0
    capacity: int | None = None

    def write_seconds(self, nbytes: int) -> float:
        """Seconds that writing one block takes."""
        return self.latency + nbytes / self.write

    def read_seconds(self, nbytes: int) -> float:
        """Seconds that reading one block takes."""
        return self.latency + nbytes / self.read


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine by name, with its tiers by name. ``origin`` is "measured" or "given"."""

    name: str
    tiers: Mapping[str, MachineTier] = field(default_factory=dict)
    origin: str = "given"
