"""``verify=True``: every carry that is reached again must be the forward's, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from reroll.errors import ReplayMismatchError
from reroll.recurrence import Recurrence


class Witness:
    """Digests of the carries at segment borders, as the forward saw them first."""

    def __init__(self, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self.seen: dict[int, tuple[bytes, ...]] = {}

    def see(self, step: int, carry: Sequence[Tensor]) -> None:
        """Note the carry at a step, or compare it with what was noted. Raises ReplayMismatchError."""
        digests = tuple(digest(tensor) for tensor in carry)
        first = self.seen.setdefault(step, digests)
        for name, before, after in zip(self.recurrence.carries, first, digests, strict=True):
            if before != after:
                raise ReplayMismatchError(
                    f"verify: at step {step} of {self.recurrence.name} ({self.recurrence.where}) the recomputed value "
                    f"{name!r} differs from the forward's. A step must give the same result each time it runs: look "
                    "for operations that are not deterministic (torch.use_deterministic_algorithms), or inputs that "
                    "were changed in between."
                )


def digest(tensor: Tensor) -> bytes:
    """A hash of a tensor's bytes."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    data = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
