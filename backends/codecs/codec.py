"""Storage of tensors, lossless but on request: what a codec cannot give back bit for bit is stored as it is ("raw").

========  =====================================================================  ===========================
codec     what it holds                                                          bytes for n elements of s
========  =====================================================================  ===========================
bits      only 0 and 1 (a float's -0.0 is not 0)                                 n/8
two       at most two bit patterns, found at run time                            n/8 + 2s
small     integers that fit uint8, int8 or int16                                 n or 2n
sparse    anything; only where it is smaller: mask and nonzero bit patterns      n/8 + s (nonzero elements)
raw       anything                                                               n s
========  =====================================================================  ===========================

"bfloat16" and "int8" round (``reroll.backends.codecs.rounding``) where "sparse" takes more bytes and all values are
finite.

Elements are taken in memory order, so a dense tensor keeps its strides (transposed, channels_last); one with gaps or
overlaps comes back contiguous. On a CPU temporaries stay below 1 MiB; on other devices a check waits for the device, so
what is proved to be 0 and 1 is packed without one there, and what may or may not be sparse is stored as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reroll.backends.codecs.rounding import is_exact, rounded, rounded_nbytes, unrounded
from reroll.errors import StorageError, UnsupportedError
from reroll.segment.facts import FLOATS, INTEGERS, LOSSY, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

BLOCK = 1 << 16  # elements that a CPU codec handles at a time: they stay in the cache; a multiple of 8
NUMPY = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}
OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)  # the bits of every byte


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A tensor as it is stored. ``payload`` holds one-dimensional contiguous tensors; nobody may write to them.

    ``codec`` is the one that was used, which is "raw" where the wanted one does not fit. ``stride`` is in elements.
    ``device`` is where the decoded tensor lives; the payload may be elsewhere.
    """

    codec: str
    payload: tuple[Tensor, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(tensor.nbytes for tensor in self.payload)

    @property
    def numel(self) -> int:
        """Elements of the decoded tensor."""
        return int(np.prod(self.shape, dtype=np.int64))


def encode(tensor: Tensor, codec: str = "sparse", copy: bool = True, proved: bool = False) -> Encoded:
    """Store the values of ``tensor``, detached, with ``codec`` if that gives them back bit for bit, else "raw".

    A codec that rounds does so, unless "sparse" takes no more bytes, or a value is not finite.
    With ``copy=False`` a raw payload is the tensor's own memory: the caller promises that nobody writes to it. A
    tensor that is part of a larger storage is copied all the same, so as not to keep the rest of it alive.
    ``proved``: the values fit "bits", if that is the codec; no device is waited for then, nor to see what is sparse.
    """
    if codec not in (*ENCODERS, *LOSSY):
        raise StorageError(f"There is no codec {codec!r}. Choose one of {', '.join((*ENCODERS, *LOSSY))}.")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"A {tensor.layout} tensor cannot be stored. Convert it with .to_dense() first.")
    source = tensor.detach().resolve_conj().resolve_neg()
    if not is_dense(source):
        source, copy = _words(source).contiguous().view(source.dtype), False  # torch's own copy makes 1 of a bool's 2
    flat = source.as_strided((source.numel(),), (1,))
    unasked = proved and codec in UNASKED and not _on_host(flat)
    payload = None
    if flat.numel() and not flat.is_complex():
        codec, payload = (codec, UNASKED[codec](flat)) if unasked else _encoded(flat, codec)
    if payload is None:
        codec = "raw"
        partial = flat.nbytes < flat.untyped_storage().nbytes()
        payload = (_words(flat).clone().view(flat.dtype) if copy or partial else flat,)
    return Encoded(codec, payload, tuple(tensor.shape), source.stride(), tensor.dtype, tensor.device)


def _encoded(flat: Tensor, codec: str) -> tuple[str, tuple[Tensor, ...] | None]:
    """The codec that is used, and what it holds; None where that is nothing."""
    if codec not in LOSSY:
        return codec, ENCODERS[codec](flat)
    lossless = _encode_sparse(flat, None if is_exact() else rounded_nbytes(flat.numel(), flat.dtype, codec))
    payload = None if lossless or is_exact() else rounded(flat, codec)
    return (codec, payload) if payload else ("sparse", lossless or _encode_sparse(flat))


def decode(encoded: Encoded) -> Tensor:
    """The tensor, bit for bit if its codec does not round.

    On ``encoded.device``; fresh memory, except that "raw" is its payload there.
    """
    flat = encoded.payload[0] if encoded.codec == "raw" else DECODERS[encoded.codec](encoded)
    return flat.to(encoded.device).as_strided(encoded.shape, encoded.stride)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return tensor.numel() > 0 or tensor.is_contiguous()


def _words(flat: Tensor) -> Tensor:
    """The bit patterns as integers, the same memory; complex numbers stay what they are."""
    return flat if flat.is_complex() else flat.view(WORDS[flat.dtype.itemsize])


def _encode_bits(flat: Tensor) -> tuple[Tensor, ...] | None:
    packed = _pack(_words(flat), *_zero_and_one(flat.dtype))
    return None if packed is None else (packed,)


def _decode_bits(encoded: Encoded) -> Tensor:
    return _unpack(encoded, *_zero_and_one(encoded.dtype))


def _encode_two(flat: Tensor) -> tuple[Tensor, ...] | None:
    words = _words(flat)
    first, second = int(words[0]), _another(words)
    packed = _pack(words, first, second)
    return None if packed is None else (packed, torch.tensor([first, second], dtype=words.dtype, device=words.device))


def _decode_two(encoded: Encoded) -> Tensor:
    return _unpack(encoded, *encoded.payload[1].tolist())


@lru_cache
def _zero_and_one(dtype: torch.dtype) -> tuple[int, int]:
    zero, one = _words(torch.tensor([0, 1]).to(dtype)).tolist()
    return zero, one


@lru_cache(maxsize=64)
def _table(word: torch.dtype, first: int, second: int) -> NDArray[Any]:
    """For every byte eight words: ``second`` where its bit is set, else ``first``."""
    return np.where(OCTETS, second, first).astype(NUMPY[word])


def _another(words: Tensor) -> int:
    """A pattern that differs from the first one; the first one if there is none."""
    for block in _blocks(words):
        differing = block != words[0]
        place = int(differing.to(torch.uint8).argmax())
        if differing[place]:
            return int(block[place])
    return int(words[0])


def _on_host(tensor: Tensor) -> bool:
    """Whether numpy sees the memory of a tensor."""
    return tensor.device.type == "cpu"


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    """The parts that are handled at a time: all at once on a device."""
    step = BLOCK if _on_host(flat) else flat.numel()
    return (flat[start : start + step] for start in range(0, flat.numel(), step))


def _pack(words: Tensor, first: int, second: int) -> Tensor | None:
    """One bit per element, set where it is ``second``; None unless every element is one of the two."""
    if not _on_host(words):
        mask = words == second
        return _pack_mask(mask) if bool((mask | (words == first)).all()) else None
    packed = torch.empty(-(-words.numel() // 8), dtype=torch.uint8)
    source, target = words.numpy(), packed.numpy()
    for start in range(0, source.size, BLOCK):
        block = source[start : start + BLOCK]
        mask = block == second
        if not np.all(mask | (block == first)):
            return None
        target[start // 8 : (start + BLOCK) // 8] = np.packbits(mask)
    return packed


def _pack_mask(mask: Tensor) -> Tensor:
    """One bit per element of a mask on any device; the first element is the highest bit of its byte."""
    octets = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=mask.device)
    return (octets << places).sum(1, dtype=torch.uint8)


def _unpack(encoded: Encoded, first: int, second: int) -> Tensor:
    """The inverse of ``_pack``: every byte selects eight elements from a table of 256 rows."""
    packed = encoded.payload[0].to(encoded.device)
    word = WORDS[encoded.dtype.itemsize]
    table = _table(word, first, second)
    words = torch.empty(packed.numel() * 8, dtype=word, device=packed.device)
    if _on_host(words):
        np.take(table, packed.numpy(), axis=0, out=words.view(-1, 8).numpy(), mode="clip")
    else:
        torch.index_select(torch.from_numpy(table).to(words.device), 0, packed.int(), out=words.view(-1, 8))
    return words[: encoded.numel].view(encoded.dtype)


def _encode_small(flat: Tensor) -> tuple[Tensor, ...] | None:
    if flat.dtype not in FLOATS + INTEGERS or flat.dtype.itemsize == 1:
        return None
    low, high = (bound.item() for bound in flat.aminmax())
    for dtype in (torch.uint8, torch.int8, torch.int16):
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max and dtype.itemsize < flat.dtype.itemsize:
            narrow = flat.to(dtype)
            return (narrow,) if _same(flat, narrow) else None
    return None


def _same(flat: Tensor, narrow: Tensor) -> bool:
    """Whether ``narrow`` gives back ``flat`` bit for bit."""
    pairs = zip(_blocks(flat), _blocks(narrow), strict=True)
    return all(torch.equal(_words(block), _words(part.to(flat.dtype))) for block, part in pairs)


def _decode_small(encoded: Encoded) -> Tensor:
    return encoded.payload[0].to(encoded.device, encoded.dtype)


def _encode_sparse(flat: Tensor, most: int | None = None) -> tuple[Tensor, ...] | None:
    """The payload if it takes fewer bytes than the tensor, and at most ``most``."""
    words = _words(flat)
    count = int(torch.count_nonzero(words))
    nbytes = -(-words.numel() // 8) + count * flat.dtype.itemsize
    if nbytes >= flat.nbytes or (most is not None and nbytes > most):
        return None
    if not _on_host(words):
        mask = words != 0
        return _pack_mask(mask), words[mask]
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
    return packed, values


def _decode_sparse(encoded: Encoded) -> Tensor:
    packed, values = (tensor.to(encoded.device) for tensor in encoded.payload)
    words = torch.zeros(encoded.numel, dtype=values.dtype, device=encoded.device)
    if not _on_host(words):
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


ENCODERS: dict[str, Callable[[Tensor], tuple[Tensor, ...] | None]] = {
    "raw": lambda flat: None,  # as it is
    "bits": _encode_bits,
    "two": _encode_two,
    "small": _encode_small,
    "sparse": _encode_sparse,
}
UNASKED: dict[str, Callable[[Tensor], tuple[Tensor, ...] | None]] = {
    "bits": lambda flat: (_pack_mask(_words(flat) != 0),),
    "sparse": lambda flat: None,
}  # how values of a device are stored of which nothing is asked
DECODERS: dict[str, Callable[[Encoded], Tensor]] = {
    "bits": _decode_bits,
    "two": _decode_two,
    "small": _decode_small,
    "sparse": _decode_sparse,
    "bfloat16": lambda encoded: unrounded(encoded.payload, encoded.dtype, encoded.device),
    "int8": lambda encoded: unrounded(encoded.payload, encoded.dtype, encoded.device),
}
