"""Codecs that round, for carries alone and on request only: what is decoded is near what was encoded, not equal.

========  =====================================================================  ===========================
codec     what it holds                                                          bytes for n elements of s
========  =====================================================================  ===========================
bfloat16  the nearest number with 8 bits of precision: off by 0.4 % at most      2n
int8      multiples of 1/127 of the largest of 64 neighbours: off by 0.4 % of    n + ceil(n/64) max(s, 4)
          that one at most
========  =====================================================================  ===========================

A tensor with a value that is not finite, or would not be once rounded, is not rounded at all. Zeros stay zeros (int8
drops their sign); what is too small beside its neighbours, or for the format, becomes zero. The scale of blocks of
neighbours is that of Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from reroll.segment.facts import FLOATS, LOSSY

NEIGHBOURS, LARGEST = 64, 127
_EXACT = threading.Event()  # set while nothing may be rounded
BLOCK = 1 << 14  # elements that are handled at a time on a CPU; a multiple of NEIGHBOURS


def rounded_nbytes(numel: int, dtype: torch.dtype, codec: str) -> int:
    """Bytes of ``numel`` elements under a codec that rounds."""
    scales = -(-numel // NEIGHBOURS) * _wide(dtype).itemsize if codec == "int8" else 0
    return numel * LOSSY[codec] + scales


def rounded(flat: Tensor, codec: str) -> tuple[Tensor, ...] | None:
    """The payload of one-dimensional floats.

    None for others, where that would take no fewer bytes, and where a number would not be finite.
    """
    if flat.dtype not in FLOATS or rounded_nbytes(flat.numel(), flat.dtype, codec) >= flat.nbytes:
        return None
    return _to_int8(flat) if codec == "int8" else _to_bfloat16(flat)


def unrounded(payload: tuple[Tensor, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers of a payload in ``dtype``, on a device."""
    if len(payload) == 1:
        return payload[0].to(device, dtype)
    steps, scales = (part.to(device) for part in payload)
    found = torch.empty(steps.numel(), dtype=dtype, device=device)
    for block, made, scale in zip(_blocks(steps), _blocks(found), _blocks(scales, NEIGHBOURS), strict=True):
        made.copy_((_neighbours(block.to(scale.dtype)) * scale[:, None]).view(-1)[: made.numel()])
    return found


@contextmanager
def exactly() -> Iterator[None]:
    """Let nothing be rounded, in any thread: the backward of a GPU runs in one of its own."""
    _EXACT.set()
    try:
        yield
    finally:
        _EXACT.clear()


def is_exact() -> bool:
    """Whether nothing may be rounded at present."""
    return _EXACT.is_set()


def _to_bfloat16(flat: Tensor) -> tuple[Tensor, ...] | None:
    ends = torch.stack(flat.aminmax())  # NaN if there is one
    return (flat.to(torch.bfloat16),) if bool(ends.to(torch.bfloat16).isfinite().all()) else None


def _to_int8(flat: Tensor) -> tuple[Tensor, ...] | None:
    steps = torch.empty(flat.numel(), dtype=torch.int8, device=flat.device)
    scales = torch.empty(-(-flat.numel() // NEIGHBOURS), dtype=_wide(flat.dtype), device=flat.device)
    for block, made, scale in zip(_blocks(flat), _blocks(steps), _blocks(scales, NEIGHBOURS), strict=True):
        values = _neighbours(block.to(scale.dtype))
        torch.div(values.abs().amax(1), LARGEST, out=scale)
        if not bool((scale * LARGEST).to(flat.dtype).isfinite().all()):
            return None
        values = (values / scale.where(scale > 0, 1)[:, None]).round_().clamp_(-LARGEST, LARGEST)
        made.copy_(values.view(-1)[: made.numel()])
    return steps, scales


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The format of scales, and of what is computed with them."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _neighbours(values: Tensor) -> Tensor:
    """Rows of neighbours, the last one filled up with zeros."""
    return functional.pad(values, (0, -values.numel() % NEIGHBOURS)).view(-1, NEIGHBOURS)


def _blocks(flat: Tensor, each: int = 1) -> Iterator[Tensor]:
    """The parts that are handled at a time, of what has a value for each so many elements; all at once on a device."""
    step = BLOCK // each if flat.device.type == "cpu" else max(flat.numel(), 1)
    return (flat[start : start + step] for start in range(0, flat.numel(), step))
