"""Codecs of one bit per element: "bits" for 0 and 1, "two" for any two bit patterns, which are found at run time."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reroll.backends.codecs.codec import Codec, Encoded, Held, register_codec
from reroll.backends.codecs.words import BLOCK, blocks, on_host, packed_mask, words_of
from reroll.segment.facts import WORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMPY = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}
OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)  # the bits of every byte


def _encode_bits(flat: Tensor) -> Held | None:
    packed = _pack(words_of(flat), *_zero_and_one(flat.dtype))
    return None if packed is None else ("bits", (packed,))


def _unasked_bits(flat: Tensor) -> Held:
    return "bits", (packed_mask(words_of(flat) != 0),)


def _decode_bits(encoded: Encoded) -> Tensor:
    return _unpack(encoded, *_zero_and_one(encoded.dtype))


def _nbytes_bits(numel: int, dtype: torch.dtype) -> int:
    return -(-numel // 8)


def _encode_two(flat: Tensor) -> Held | None:
    words = words_of(flat)
    first, second = int(words[0]), _another(words)
    packed = _pack(words, first, second)
    if packed is None:
        return None
    return "two", (packed, torch.tensor([first, second], dtype=words.dtype, device=words.device))


def _decode_two(encoded: Encoded) -> Tensor:
    return _unpack(encoded, *encoded.payload[1].tolist())


def _nbytes_two(numel: int, dtype: torch.dtype) -> int:
    return -(-numel // 8) + 2 * dtype.itemsize


@lru_cache
def _zero_and_one(dtype: torch.dtype) -> tuple[int, int]:
    zero, one = words_of(torch.tensor([0, 1]).to(dtype)).tolist()
    return zero, one


@lru_cache(maxsize=64)
def _table(word: torch.dtype, first: int, second: int) -> NDArray[Any]:
    """For every byte eight words: ``second`` where its bit is set, else ``first``."""
    return np.where(OCTETS, second, first).astype(NUMPY[word])


def _another(words: Tensor) -> int:
    """A pattern that differs from the first one; the first one if there is none."""
    for block in blocks(words):
        differing = block != words[0]
        place = int(differing.to(torch.uint8).argmax())
        if differing[place]:
            return int(block[place])
    return int(words[0])


def _pack(words: Tensor, first: int, second: int) -> Tensor | None:
    """One bit per element, set where it is ``second``; None unless every element is one of the two."""
    if not on_host(words):
        mask = words == second
        return packed_mask(mask) if bool((mask | (words == first)).all()) else None
    packed = torch.empty(-(-words.numel() // 8), dtype=torch.uint8)
    source, target = words.numpy(), packed.numpy()
    for start in range(0, source.size, BLOCK):
        block = source[start : start + BLOCK]
        mask = block == second
        if not np.all(mask | (block == first)):
            return None
        target[start // 8 : (start + BLOCK) // 8] = np.packbits(mask)
    return packed


def _unpack(encoded: Encoded, first: int, second: int) -> Tensor:
    """The inverse of ``_pack``: every byte selects eight elements from a table of 256 rows."""
    packed = encoded.payload[0].to(encoded.device)
    word = WORDS[encoded.dtype.itemsize]
    table = _table(word, first, second)
    words = torch.empty(packed.numel() * 8, dtype=word, device=packed.device)
    if on_host(words):
        np.take(table, packed.numpy(), axis=0, out=words.view(-1, 8).numpy(), mode="clip")
    else:
        torch.index_select(torch.from_numpy(table).to(words.device), 0, packed.int(), out=words.view(-1, 8))
    return words[: encoded.numel].view(encoded.dtype)


register_codec(Codec("bits", _encode_bits, _decode_bits, _nbytes_bits, unasked=_unasked_bits))
register_codec(Codec("two", _encode_two, _decode_two, _nbytes_two))
