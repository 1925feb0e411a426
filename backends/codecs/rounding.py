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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from reroll.backends.codecs.codec import Codec, Encoded, Held, as_it_is, register_codec
from reroll.backends.codecs.sparse import encode_sparse
from reroll.backends.codecs.words import blocks
from reroll.segment.facts import FLOATS, LOSSY

NEIGHBOURS, LARGEST = 64, 127
_EXACT = threading.Event()  # set while nothing may be rounded
BLOCK = 1 << 14  # elements that are handled at a time on a CPU; a multiple of NEIGHBOURS
SCALES = BLOCK // NEIGHBOURS


@contextmanager
def exactly() -> Iterator[None]:
    """Let nothing be rounded, in any thread: the backward of a GPU runs in one of its own."""
    _EXACT.set()
    try:
        yield
    finally:
        _EXACT.clear()


def _encode(flat: Tensor, nbytes: int, rounded: Callable[[Tensor], Held | None]) -> Held | None:
    """``rounded``, which takes so many bytes, unless "sparse" takes no more."""
    if _EXACT.is_set() or flat.dtype not in FLOATS or nbytes >= flat.nbytes:
        return encode_sparse(flat)
    return encode_sparse(flat, nbytes) or rounded(flat) or encode_sparse(flat)


def _encode_bfloat16(flat: Tensor) -> Held | None:
    return _encode(flat, _nbytes_bfloat16(flat.numel(), flat.dtype), _to_bfloat16)


def _nbytes_bfloat16(numel: int, dtype: torch.dtype) -> int:
    return min(numel * LOSSY["bfloat16"], as_it_is(numel, dtype))


def _to_bfloat16(flat: Tensor) -> Held | None:
    ends = torch.stack(flat.aminmax())  # NaN if there is one
    return ("bfloat16", (flat.to(torch.bfloat16),)) if bool(ends.to(torch.bfloat16).isfinite().all()) else None


def _of_bfloat16(encoded: Encoded) -> Tensor:
    return encoded.payload[0].to(encoded.device, encoded.dtype)


def _encode_int8(flat: Tensor) -> Held | None:
    return _encode(flat, _nbytes_int8(flat.numel(), flat.dtype), _to_int8)


def _nbytes_int8(numel: int, dtype: torch.dtype) -> int:
    scales = -(-numel // NEIGHBOURS) * _wide(dtype).itemsize
    return min(numel * LOSSY["int8"] + scales, as_it_is(numel, dtype))


def _to_int8(flat: Tensor) -> Held | None:
    steps = torch.empty(flat.numel(), dtype=torch.int8, device=flat.device)
    scales = torch.empty(-(-flat.numel() // NEIGHBOURS), dtype=_wide(flat.dtype), device=flat.device)
    for block, made, scale in zip(blocks(flat, BLOCK), blocks(steps, BLOCK), blocks(scales, SCALES), strict=True):
        values = _neighbours(block.to(scale.dtype))
        torch.div(values.abs().amax(1), LARGEST, out=scale)
        if not bool((scale * LARGEST).to(flat.dtype).isfinite().all()):
            return None
        values = (values / scale.where(scale > 0, 1)[:, None]).round_().clamp_(-LARGEST, LARGEST)
        made.copy_(values.view(-1)[: made.numel()])
    return "int8", (steps, scales)


def _of_int8(encoded: Encoded) -> Tensor:
    steps, scales = (part.to(encoded.device) for part in encoded.payload)
    found = torch.empty(steps.numel(), dtype=encoded.dtype, device=encoded.device)
    for block, made, scale in zip(blocks(steps, BLOCK), blocks(found, BLOCK), blocks(scales, SCALES), strict=True):
        made.copy_((_neighbours(block.to(scale.dtype)) * scale[:, None]).view(-1)[: made.numel()])
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The format of scales, and of what is computed with them."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _neighbours(values: Tensor) -> Tensor:
    """Rows of neighbours, the last one filled up with zeros."""
    return functional.pad(values, (0, -values.numel() % NEIGHBOURS)).view(-1, NEIGHBOURS)


register_codec(Codec("bfloat16", _encode_bfloat16, _of_bfloat16, _nbytes_bfloat16, exact=False))
register_codec(Codec("int8", _encode_int8, _of_int8, _nbytes_int8, exact=False))
