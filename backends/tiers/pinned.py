"""Pinned memory of the computer, in slabs that are kept for the next block."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reroll.backends.tiers.extents import Extents
from reroll.errors import StorageError
from reroll.report.tables import nbytes_text

if TYPE_CHECKING:
    from torch import Tensor

    from reroll.backends.tiers.device import Device

ALIGNMENT = 64  # bytes
_SMALLEST, _LARGEST = 1 << 26, 1 << 30  # bytes of a slab, if no block is larger


@dataclass(slots=True, eq=False)
class _Slab:
    memory: Tensor  # of bytes
    extents: Extents


class Pinned:
    """Room for the tensors of one block: ``parts``. It goes back to the pool when nobody refers to this object.

    Whoever takes it next has to wait for the copies from and to it that are under way (``Transfers`` does).
    """

    def __init__(self, parts: tuple[Tensor, ...], slab: _Slab, start: int, nbytes: int) -> None:
        self.parts = parts
        finalizer = weakref.finalize(self, slab.extents.free, start, nbytes)
        finalizer.atexit = False  # type: ignore[misc]  # typeshed lacks the slot


@dataclass(slots=True, eq=False)
class Pool:
    """Slabs of pinned memory. Pinning takes a second for a few GB, so they stay pinned until it fails.

    Slabs grow with what is pinned already, from 64 MiB to 1 GiB, in powers of two, to which torch's allocator rounds.
    """

    device: Device
    slabs: list[_Slab] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def take(self, likes: Sequence[Tensor]) -> Pinned:
        """Room for tensors like these, of any device. Raises StorageError if no more memory can be pinned."""
        sizes = [-(-like.nbytes // ALIGNMENT) * ALIGNMENT for like in likes]
        total = sum(sizes)
        slab = next((slab for slab in self.slabs if slab.extents.fits(total)), None) or self._grow(total)
        start = at = slab.extents.take(total)
        parts: list[Tensor] = []
        for like, size in zip(likes, sizes, strict=True):
            parts.append(slab.memory[at : at + like.nbytes].view(like.dtype).view(like.shape))
            at += size
        return Pinned(tuple(parts), slab, start, total)

    def trim(self) -> None:
        """Forget slabs that hold nothing. Nothing may be under way."""
        self.slabs = [slab for slab in self.slabs if slab.extents.stop or not slab.extents.fits(slab.memory.numel())]

    def _grow(self, nbytes: int) -> _Slab:
        usual = min(max(_power_of_two(self.nbytes), _SMALLEST), _LARGEST)
        size = max(usual, _power_of_two(nbytes))
        try:
            memory = self.device.pinned(size)
        except RuntimeError:
            self.trim()
            memory = self._least(nbytes)
        self.slabs.append(_Slab(memory, Extents(room=memory.numel())))
        return self.slabs[-1]

    def _least(self, nbytes: int) -> Tensor:
        try:
            return self.device.pinned(max(_power_of_two(nbytes), ALIGNMENT))
        except RuntimeError as error:
            raise StorageError(
                f"{nbytes_text(nbytes)} of the computer's memory cannot be pinned for the host tier "
                f"({str(error).splitlines()[0]}); {nbytes_text(self.nbytes)} are. Free memory, raise the limit of "
                "locked memory (ulimit -l), use remote='disk', or a smaller batch, then repeat the training step."
            ) from error


def _power_of_two(nbytes: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(nbytes - 1, 0).bit_length()
