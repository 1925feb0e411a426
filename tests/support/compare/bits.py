"""Equality to the last bit, the dtypes whose bits are tried, and the codecs that give every bit back."""

from __future__ import annotations

import torch
from torch import Tensor

LOSSLESS = ("raw", "bits", "two", "small", "sparse")
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def same(left: Tensor, right: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    pair = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*pair)
