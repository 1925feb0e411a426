"""What an allocation that failed looks like."""

from __future__ import annotations

import torch

from reroll.errors import ShortageError

_WORDS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_shortage(error: Exception) -> bool:
    """Whether an error says that memory could not be allocated; on a CPU torch raises a RuntimeError."""
    if isinstance(error, ShortageError):
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in _WORDS)
