"""What every remote tier offers: blocks of encoded tensors that are written and read in the background.

A block is written once and read as often as wanted, until it is dropped: by ``drop``, or when nobody refers to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reroll.backends.codecs import Encoded


@dataclass(slots=True)
class Traffic:
    """What a tier has moved so far: payload bytes and transfers. A block that is read twice counts twice."""

    bytes_written: int = 0
    bytes_read: int = 0
    writes: int = 0
    reads: int = 0


class Block(Protocol):
    """Encoded tensors in a tier; one transfer each way."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""

    def prefetch(self) -> None:
        """Start to read, into memory that is allocated now. Does nothing if that was started already."""

    def read(self) -> list[Encoded]:
        """Wait for the values; they are the reader's. Raises StorageError if they are not what was written."""

    def drop(self) -> None:
        """Give the space back. The block cannot be read any more; dropping it again does nothing."""


class Tier(Protocol):
    """A place for blocks. Errors of background work are raised by the next ``write``, ``read`` or ``drain``."""

    traffic: Traffic

    def write(self, values: Sequence[Encoded]) -> Block:
        """Start to write. The payloads may not be changed until they are written, and stay alive until then."""

    def drain(self) -> None:
        """Wait for all writes."""


def without_payload(values: Sequence[Encoded]) -> tuple[Encoded, ...]:
    """The values with payloads on the meta device: everything that is needed to read them, and no bytes."""
    meta = torch.device("meta")
    return tuple(
        replace(value, payload=tuple(torch.empty_like(part, device=meta) for part in value.payload)) for value in values
    )


def with_room(values: Sequence[Encoded]) -> list[Encoded]:
    """The values with fresh payloads in the computer's memory, to be filled. Allocated by torch in this thread, so that
    a profiler of this thread counts them (torch 2.13 reports memory per thread)."""
    return [
        replace(value, payload=tuple(torch.empty_like(part, device="cpu") for part in value.payload))
        for value in values
    ]
