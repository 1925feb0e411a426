"""The codec "sparse": a mask of one bit per element, and the bit patterns of those that are not zero."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reroll.backends.codecs.codec import Codec, Encoded, Held, as_it_is, register_codec
from reroll.backends.codecs.words import BLOCK, on_host, packed_mask, words_of


def encode_sparse(flat: Tensor, most: int | None = None) -> Held | None:
    """What holds the elements if it takes fewer bytes than they do, and at most ``most``."""
    words = words_of(flat)
    count = int(torch.count_nonzero(words))
    nbytes = -(-words.numel() // 8) + count * flat.dtype.itemsize
    if nbytes >= flat.nbytes or (most is not None and nbytes > most):
        return None
    if not on_host(words):
        mask = words != 0
        return "sparse", (packed_mask(mask), words[mask])
    packed = torch.empty(-(-words.numel() // 8), dtype=torch.uint8)
    values = torch.empty(count, dtype=words.dtype)
    source, target, kept, end = words.numpy(), packed.numpy(), values.numpy(), 0
    for start in range(0, source.size, BLOCK):
        block = source[start : start + BLOCK]
        mask = block != 0
        target[start // 8 : (start + BLOCK) // 8] = np.packbits(mask)
        found = block[np.flatnonzero(mask)]
        kept[end : end + found.size] = found
        end += found.size
    return "sparse", (packed, values)


def _unasked(flat: Tensor) -> None:
    """How many elements are zero only the device knows: they are stored as they are."""


def _decode(encoded: Encoded) -> Tensor:
    packed, values = (tensor.to(encoded.device) for tensor in encoded.payload)
    words = torch.zeros(encoded.numel, dtype=values.dtype, device=encoded.device)
    if not on_host(words):
        places = torch.arange(7, -1, -1, dtype=torch.uint8, device=encoded.device)
        mask = ((packed[:, None] >> places) & 1).view(-1)[: encoded.numel].bool()
        return words.masked_scatter_(mask, values).view(encoded.dtype)
    target, kept, end = words.numpy(), values.numpy(), 0
    for start in range(0, target.size, BLOCK):
        block = target[start : start + BLOCK]
        found = np.flatnonzero(np.unpackbits(packed.numpy()[start // 8 : (start + BLOCK) // 8], count=block.size))
        block[found] = kept[end : end + found.size]
        end += found.size
    return words.view(encoded.dtype)


register_codec(Codec("sparse", encode_sparse, _decode, as_it_is, unasked=_unasked))
