"""The random number state that a step reads: the computer's, and that of the GPUs that the operands live on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def random_state(operands: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The present state: of the computer first, then of each GPU among the operands' devices, in order of index."""
    indices = sorted({operand.device.index for operand in operands if operand.device.type == "cuda"})
    return (torch.get_rng_state(), *(_marked(index) for index in indices))


def _marked(index: int) -> Tensor:
    """A GPU's state with its index in front, so that a state alone says where it belongs."""
    return torch.cat([torch.tensor([index], dtype=torch.uint8), torch.cuda.get_rng_state(index)])


def set_random_state(state: tuple[Tensor, ...]) -> None:
    """Go back to a state."""
    torch.set_rng_state(state[0])
    for marked in state[1:]:
        torch.cuda.set_rng_state(marked[1:], int(marked[0]))


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Put back the states of Python's, numpy's and torch's generators afterwards."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that users share
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
