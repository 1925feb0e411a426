"""The computer's memory as a tier: pinned, and copied beside a device's work; a plain copy for values of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reroll.backends.tiers.available import free_memory
from reroll.backends.tiers.device import background_of
from reroll.backends.tiers.tier import Traffic, copied, payloads, register_tier, with_payloads
from reroll.backends.tiers.transfers import transfers_of
from reroll.errors import StorageError
from reroll.schedules.machine import REMOTE_TIERS

if TYPE_CHECKING:
    import torch

    from reroll.backends.codecs.codec import Encoded

Finish = Callable[[], list["Encoded"]]
"""Gives the values of a copy that was started."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostBlock:
    """Values in the computer's memory, and how to start to bring them back."""

    traffic: Traffic
    nbytes: int
    _start: Callable[[], Finish] | None
    _fetched: Finish | None = None

    def prefetch(self) -> None:
        """Start to copy back."""
        if self._start is None:
            raise StorageError("A block in host memory was read after it was dropped. Keep it until its last read.")
        if self._fetched is not None:
            return
        self._fetched = self._start()
        self.traffic.reads += 1
        self.traffic.bytes_read += self.nbytes

    def read(self) -> list[Encoded]:
        """The values, for work on the stream that was the present one when the copy was started."""
        self.prefetch()
        fetched, self._fetched = self._fetched, None
        return fetched() if fetched else []

    def drop(self) -> None:
        """Free the memory."""
        self._start = self._fetched = None


@dataclass(slots=True, eq=False)
class HostTier:
    """Blocks in the computer's memory; for a device that works in the background moved by its ``Transfers``."""

    traffic: Traffic = field(default_factory=Traffic)
    _device: torch.device | None = None

    def write(self, values: Sequence[Encoded]) -> HostBlock:
        """Copy the values, on a device behind the present work. Raises StorageError if no memory can be pinned."""
        device = background_of(values)
        nbytes = sum(value.nbytes for value in values)
        start = _copied(values) if device is None else _parked(values, device)
        self._device = device or self._device
        self.traffic.writes += 1
        self.traffic.bytes_written += nbytes
        return HostBlock(self.traffic, nbytes, start)

    def settle(self) -> None:
        """Let the present work of the device wait for all copies to here."""
        if self._device:
            transfers_of(self._device).settle()

    def drain(self) -> None:
        """Wait for all copies."""
        if self._device:
            transfers_of(self._device).drain()


def _copied(values: Sequence[Encoded]) -> Callable[[], Finish]:
    """Copy values at once. The result copies them back."""
    kept = with_payloads(values, map(copied, payloads(values)))

    def start() -> Finish:
        back = with_payloads(kept, map(copied, payloads(kept)))
        return lambda: back

    return start


def _parked(values: Sequence[Encoded], device: torch.device) -> Callable[[], Finish]:
    """Start to copy the values of a device to pinned memory. The result starts to copy them back."""
    transfers = transfers_of(device)
    parked = transfers.park(payloads(values, device))
    kept = with_payloads(values, parked.parts, device)

    def start() -> Finish:
        arrival = transfers.expect(parked.parts)
        transfers.send(arrival.targets, parked.parts, parked.written)
        return lambda: with_payloads(kept, arrival.take(), device)

    return start


register_tier(REMOTE_TIERS.find("host"), lambda folder: HostTier(), lambda folder: free_memory())
