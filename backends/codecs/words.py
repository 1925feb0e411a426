"""The elements of a tensor as integers of the same size, a block at a time, and one bit for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reroll.segment.facts import WORDS

BLOCK = 1 << 16  # elements that a CPU codec handles at a time: they stay in the cache; a multiple of 8
HOST = "cpu"  # the device whose memory numpy sees


def on_host(tensor: Tensor) -> bool:
    """Whether numpy sees the memory of a tensor."""
    return tensor.device.type == HOST


def words_of(flat: Tensor) -> Tensor:
    """The bit patterns as integers, the same memory; complex numbers stay what they are."""
    return flat if flat.is_complex() else flat.view(WORDS[flat.dtype.itemsize])


def blocks(flat: Tensor, size: int = BLOCK) -> Iterator[Tensor]:
    """The parts that are handled at a time, of ``size`` elements: all at once on a device."""
    step = size if on_host(flat) else max(flat.numel(), 1)
    return (flat[start : start + step] for start in range(0, flat.numel(), step))


def packed_mask(mask: Tensor) -> Tensor:
    """One bit per element of a mask on any device; the first element is the highest bit of its byte."""
    octets = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=mask.device)
    return (octets << places).sum(1, dtype=torch.uint8)
