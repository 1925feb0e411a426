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
finite. Each file of this folder registers its codecs; ``__init__`` lists the files.

Elements are taken in memory order, so a dense tensor keeps its strides (transposed, channels_last); one with gaps or
overlaps comes back contiguous. On a CPU temporaries stay below 1 MiB; on other devices a check waits for the device, so
what is proved to be 0 and 1 is packed without one there, and what may or may not be sparse is stored as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reroll.backends.codecs.words import on_host, words_of
from reroll.errors import StorageError, UnsupportedError
from reroll.graph.layouts import is_dense
from reroll.words.registry import Registry


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


Held = tuple[str, tuple[Tensor, ...]]
"""The name of the codec that gives elements back, and the payload that it needs."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to store the elements of a tensor, which both functions take in memory order, as one dimension.

    ``encode``: what holds elements, one at least and no complex numbers; another codec's where that is better; None
        where they cannot be given back bit for bit, or, by a codec that rounds, as finite numbers.
    ``decode``: the elements, on the tensor's device.
    ``nbytes``: bytes at most of what holds a number of elements of a dtype.
    ``exact``: whether every bit comes back.
    ``unasked``: ``encode`` for elements on a device that are proved to fit, without waiting for it.
    """

    name: str
    encode: Callable[[Tensor], Held | None]
    decode: Callable[[Encoded], Tensor]
    nbytes: Callable[[int, torch.dtype], int]
    exact: bool = True
    unasked: Callable[[Tensor], Held | None] | None = None


CODECS: Registry[Codec] = Registry("codec", StorageError)


def register_codec(codec: Codec) -> Codec:
    """Let ``encode`` and ``decode`` know a codec. Raises StorageError for a name that is taken."""
    CODECS.add(codec, codec.encode)
    return codec


def as_it_is(numel: int, dtype: torch.dtype) -> int:
    """Bytes of elements that are stored as they are."""
    return numel * dtype.itemsize


RAW = register_codec(Codec("raw", lambda flat: None, lambda encoded: encoded.payload[0], as_it_is))


def encode(tensor: Tensor, codec: str = "sparse", copy: bool = True, proved: bool = False) -> Encoded:
    """Store the values of ``tensor``, detached, with ``codec`` if that gives them back bit for bit, else "raw".

    A codec that rounds does so, unless "sparse" takes no more bytes, or a value is not finite.
    With ``copy=False`` a raw payload is the tensor's own memory: the caller promises that nobody writes to it. A
    tensor that is part of a larger storage is copied all the same, so as not to keep the rest of it alive.
    ``proved``: the values fit "bits", if that is the codec; no device is waited for then, nor to see what is sparse.
    """
    asked = CODECS.find(codec)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"A {tensor.layout} tensor cannot be stored. Convert it with .to_dense() first.")
    source = tensor.detach().resolve_conj().resolve_neg()
    if not is_dense(source):
        source, copy = words_of(source).contiguous().view(source.dtype), False  # torch's own copy makes 1 of a bool's 2
    flat = source.as_strided((source.numel(),), (1,))
    held = None
    if flat.numel() and not flat.is_complex():
        unasked = asked.unasked if proved and not on_host(flat) else None
        held = (unasked or asked.encode)(flat)
    if held is None:
        partial = flat.nbytes < flat.untyped_storage().nbytes()
        held = RAW.name, (words_of(flat).clone().view(flat.dtype) if copy or partial else flat,)
    return Encoded(*held, tuple(tensor.shape), source.stride(), tensor.dtype, tensor.device)


def decode(encoded: Encoded) -> Tensor:
    """The tensor, bit for bit if its codec does not round.

    On ``encoded.device``; fresh memory, except that "raw" is its payload there.
    """
    flat = CODECS.find(encoded.codec).decode(encoded)
    return flat.to(encoded.device).as_strided(encoded.shape, encoded.stride)
