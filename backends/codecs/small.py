"""The codec "small": integers, of whatever dtype, in the narrowest of uint8, int8 and int16 that holds them all."""

from __future__ import annotations

import torch
from torch import Tensor

from reroll.backends.codecs.codec import Codec, Encoded, Held, register_codec
from reroll.backends.codecs.words import blocks, words_of
from reroll.segment.facts import FLOATS, INTEGERS


def _encode(flat: Tensor) -> Held | None:
    if flat.dtype not in FLOATS + INTEGERS or flat.dtype.itemsize == 1:
        return None
    low, high = (bound.item() for bound in flat.aminmax())
    for dtype in (torch.uint8, torch.int8, torch.int16):
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max and dtype.itemsize < flat.dtype.itemsize:
            narrow = flat.to(dtype)
            return ("small", (narrow,)) if _same(flat, narrow) else None
    return None


def _same(flat: Tensor, narrow: Tensor) -> bool:
    """Whether ``narrow`` gives back ``flat`` bit for bit."""
    pairs = zip(blocks(flat), blocks(narrow), strict=True)
    return all(torch.equal(words_of(block), words_of(part.to(flat.dtype))) for block, part in pairs)


def _decode(encoded: Encoded) -> Tensor:
    return encoded.payload[0].to(encoded.device, encoded.dtype)


def _nbytes(numel: int, dtype: torch.dtype) -> int:
    return numel * min(dtype.itemsize, 2)


register_codec(Codec("small", _encode, _decode, _nbytes))
