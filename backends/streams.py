"""Devices that work in the background: queues of work (streams), marks in them (events), and memory they can reach.

What the host tier and the staging of the disk tier need of a device is this protocol, in CUDA's words, so that tests
can put a simulated device in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Event(Protocol):
    """A mark in a stream: it is over once all is done that was queued before it."""

    def synchronize(self) -> None:
        """Let this thread wait until it is over."""


class Stream(Protocol):
    """A queue of work that is done in order."""

    def record_event(self) -> Event:
        """Mark the end of what is queued so far."""

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on wait for an event of any stream. This thread does not wait."""


class Device(Protocol):
    """One device. What it allocates is freed behind the work of the stream that was the present one then."""

    def present(self) -> Stream:
        """The stream on which this thread queues its work."""

    def side(self) -> Stream:
        """A new stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Bytes of the computer's memory that the device can reach. Raises RuntimeError if there are none left."""

    def room(self, like: Tensor) -> Tensor:
        """Uninitialised memory of the device, of the shape and type of a tensor."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Queue a copy of bytes between the device and pinned memory."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device."""

    device: torch.device

    def present(self) -> Stream:
        """As ``Device`` says."""
        return cast(Stream, torch.cuda.current_stream(self.device))

    def side(self) -> Stream:
        """As ``Device`` says."""
        return cast(Stream, torch.cuda.Stream(self.device))

    def pinned(self, nbytes: int) -> Tensor:
        """As ``Device`` says."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def room(self, like: Tensor) -> Tensor:
        """As ``Device`` says."""
        return torch.empty_like(like, device=self.device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """As ``Device`` says."""
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            target.copy_(source, non_blocking=True)


KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
"""Devices that work in the background, by the type of ``torch.device``. On all others copies are done at once."""


@cache
def device_of(device: torch.device) -> Device | None:
    """The device behind a ``torch.device`` with an index; None where work is done at once, as on a CPU."""
    kind = KINDS.get(device.type)
    return kind(device) if kind else None
