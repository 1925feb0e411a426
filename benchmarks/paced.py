"""A remote tier as slow as one likes: a stand-in for disks and networks that are not here.

Values lie in the computer's memory. A block is written once it has waited for its turn, for the latency and for its
bytes at the given bandwidth; so it is with reading. Writes and reads have a lane each, as ``MachineTier`` says of a
tier. Nothing works in the background: whoever needs a block before it would be there sleeps until then, so that a
tier takes no time of the processor but for the copies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from reroll.backends.codecs.codec import Encoded
from reroll.backends.tiers.tier import STAGING, Traffic, copied, payloads, register_tier, with_payloads
from reroll.schedules.machine import REMOTE_TIERS, RemoteTier


@dataclass
class Lane:
    """One transfer after another, each in ``latency`` seconds and its bytes at ``bandwidth`` bytes a second."""

    bandwidth: float
    latency: float
    free_at: float = 0.0

    def take(self, nbytes: int) -> float:
        """When a transfer that is asked for now has ended, on the clock of ``time.perf_counter``."""
        begin = max(self.free_at, time.perf_counter())
        self.free_at = begin + self.latency + nbytes / self.bandwidth
        return self.free_at


@dataclass(eq=False)
class PacedBlock:
    """Values, and when they are here again."""

    tier: PacedTier
    values: list[Encoded]
    nbytes: int
    here_at: float | None = None

    def prefetch(self) -> None:
        """Start to read: behind all writes, as the disk tier does."""
        if self.here_at is None:
            self.tier.settle()
            self.here_at = self.tier.reads.take(self.nbytes)
            self.tier.traffic.reads += 1
            self.tier.traffic.bytes_read += self.nbytes

    def read(self) -> list[Encoded]:
        """Wait until the values are here."""
        self.prefetch()
        assert self.here_at is not None
        sleep_until(self.here_at)
        self.here_at = None
        return with_payloads(self.values, map(copied, payloads(self.values)))

    def drop(self) -> None:
        """Free the memory."""
        self.values = []


@dataclass(eq=False)
class PacedTier:
    """Blocks in memory, moved at a given pace."""

    writes: Lane
    reads: Lane
    traffic: Traffic = field(default_factory=Traffic)
    under_way: deque[float] = field(default_factory=deque)

    def write(self, values: Sequence[Encoded]) -> PacedBlock:
        """Start to write; wait first while too many blocks are still to be written."""
        self._wait(STAGING - 1)
        nbytes = sum(value.nbytes for value in values)
        self.under_way.append(self.writes.take(nbytes))
        self.traffic.writes += 1
        self.traffic.bytes_written += nbytes
        return PacedBlock(self, with_payloads(values, map(copied, payloads(values))), nbytes)

    def settle(self) -> None:
        """Wait for all writes."""
        self._wait(0)

    drain = settle

    def _wait(self, most: int) -> None:
        while len(self.under_way) > most:
            sleep_until(self.under_way.popleft())


MADE: list[PacedTier] = []
"""All tiers of this process."""


def sleep_until(moment: float) -> None:
    """Sleep until a moment of ``time.perf_counter``."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def paced(bandwidth: float, latency: float) -> str:
    """The name of a tier of that pace, bytes a second and seconds, which is there from then on."""
    name = f"paced_{bandwidth / 1e6:.0f}MBps_{latency * 1e6:.0f}us"
    if name not in REMOTE_TIERS.names():
        register_tier(RemoteTier(name), lambda _folder: _made(bandwidth, latency), lambda _folder: None)
    return name


def _made(bandwidth: float, latency: float) -> PacedTier:
    MADE.append(PacedTier(Lane(bandwidth, latency), Lane(bandwidth, latency)))
    return MADE[-1]


def written() -> int:
    """Bytes that were written to all paced tiers so far."""
    return sum(tier.traffic.bytes_written for tier in MADE)
