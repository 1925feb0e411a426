"""What every remote tier offers: blocks of encoded tensors that are written and read in the background.

A block is written once and read as often as wanted, until it is dropped: by ``drop``, or when nobody refers to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from reroll.errors import MachineError
from reroll.schedules.machine import REMOTE_TIERS, RemoteTier
from reroll.words.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from reroll.backends.codecs.codec import Encoded

STAGING = 2
"""Blocks at most that wait in local memory to be written."""


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
    """A place for blocks. Errors of background work are raised by the next ``write``, ``read``, ``settle`` or
    ``drain``."""

    traffic: Traffic

    def write(self, values: Sequence[Encoded]) -> Block:
        """Start to write. The payloads may not be changed until they are written, and stay alive until then."""

    def settle(self) -> None:
        """Let what is done from now on wait for all writes, so that no block takes local memory any more."""

    def drain(self) -> None:
        """Wait for all writes."""


Folder = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class TierKind:
    """How a tier is made. ``make`` takes the folder that blocks may be written to (None: the system's temporary one);
    ``free``: bytes that it may still hold, with that folder; None where no system says it."""

    name: str
    make: Callable[[Folder], Tier]
    free: Callable[[Folder], int | None]


TIERS: Registry[TierKind] = Registry("remote tier", MachineError)


def register_tier(tier: RemoteTier, make: Callable[[Folder], Tier], free: Callable[[Folder], int | None]) -> None:
    """Let carries be moved to a tier of that name (``remote=name``). Raises MachineError for a name that is taken."""
    TIERS.add(TierKind(tier.name, make, free), make)
    if tier.name not in REMOTE_TIERS or REMOTE_TIERS.find(tier.name) != tier:
        REMOTE_TIERS.add(tier, make)


def payloads(values: Sequence[Encoded], of: torch.device | None = None) -> list[Tensor]:
    """The payloads of some values, one after another; only those ``of`` a device, if it is given."""
    return [part for value in values if of in (None, value.device) for part in value.payload]


def with_payloads(values: Sequence[Encoded], parts: Iterable[Tensor], of: torch.device | None = None) -> list[Encoded]:
    """The values with other payloads in place of those that ``payloads`` gives."""
    following = iter(parts)
    return [
        replace(value, payload=tuple(next(following) for _ in value.payload)) if of in (None, value.device) else value
        for value in values
    ]


def without_payload(values: Sequence[Encoded]) -> tuple[Encoded, ...]:
    """The values with payloads on the meta device: everything that is needed to read them, and no bytes."""
    return tuple(with_payloads(values, (torch.empty_like(part, device="meta") for part in payloads(values))))


def with_room(values: Sequence[Encoded]) -> list[Encoded]:
    """The values with fresh payloads in the computer's memory, to be filled, where they have none. Allocated by torch
    in this thread, so that a profiler of this thread counts them (torch 2.13 reports memory per thread)."""
    parts = payloads(values)
    return with_payloads(values, (torch.empty_like(part, device="cpu") if part.is_meta else part for part in parts))


def copied(part: Tensor) -> Tensor:
    """A copy of the bytes."""
    words = part if part.is_complex() else part.view(torch.uint8)  # torch's own copy makes 1 of a bool's 2
    return words.clone().view(part.dtype)
