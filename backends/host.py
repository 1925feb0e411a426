"""The computer's memory as a tier: pinned for values of a CUDA device, a plain copy for values of the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from reroll.backends.storage import Traffic
from reroll.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from reroll.backends.codecs import Encoded


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostBlock:
    """Values in the computer's memory. Copies run on the stream that was current when they were asked for."""

    traffic: Traffic
    nbytes: int
    _kept: list[Encoded] | None
    _written: torch.cuda.Event | None
    _fetched: list[Encoded] | None = None

    def prefetch(self) -> None:
        """Start to copy back."""
        if self._kept is None:
            raise StorageError("A block in host memory was read after it was dropped. Keep it until its last read.")
        if self._fetched is not None:
            return
        if self._written is not None:
            torch.cuda.current_stream().wait_event(self._written)
        self._fetched = [_moved(value, value.device) for value in self._kept]
        self.traffic.reads += 1
        self.traffic.bytes_read += self.nbytes

    def read(self) -> list[Encoded]:
        """The values, ready for work on the stream on which they were fetched."""
        self.prefetch()
        values, self._fetched = self._fetched, None
        return values or []

    def drop(self) -> None:
        """Free the memory."""
        self._kept = self._fetched = None


@dataclass(slots=True, eq=False)
class HostTier:
    """Blocks in the computer's memory. Nothing is staged: the copies are ordered by the stream."""

    traffic: Traffic = field(default_factory=Traffic)

    def write(self, values: Sequence[Encoded]) -> HostBlock:
        """Copy the values; on CUDA behind the work of the current stream, whose allocator then guards the sources."""
        kept = [_moved(value, torch.device("cpu")) for value in values]
        on_cuda = any(part.is_cuda for value in values for part in value.payload)
        written = torch.cuda.current_stream().record_event() if on_cuda else None
        nbytes = sum(value.nbytes for value in values)
        self.traffic.writes += 1
        self.traffic.bytes_written += nbytes
        return HostBlock(self.traffic, nbytes, kept, written)

    def drain(self) -> None:
        """Wait for all copies."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _moved(value: Encoded, device: torch.device) -> Encoded:
    """A copy whose payload is on ``device``."""
    return replace(value, payload=tuple(_copy(part, device) for part in value.payload))


def _copy(source: Tensor, device: torch.device) -> Tensor:
    """A copy of the bytes, asynchronous between a CUDA device and pinned memory."""
    words = source if source.is_complex() else source.view(torch.uint8)  # torch's own copy makes 1 of a bool's 2
    pinned = device.type == "cpu" and source.is_cuda
    target = torch.empty_like(words, device=device, pin_memory=pinned)
    return target.copy_(words, non_blocking=True).view(source.dtype)
