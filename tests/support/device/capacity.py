"""A device of limited memory, simulated: where a recurrence allocates more than it has, that fails as on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reroll.backends.runtime.node import RecurrenceModule


class Capacity(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, and raises where more than ``nbytes`` would be alive.

    What a single operation makes is freed again when it does not fit. ``failed`` counts how often that was.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.alive, self.peak, self.failed = nbytes, 0, 0, 0
        self.known: dict[int, int] = {}

    @contextmanager
    def limiting(self) -> Iterator[None]:
        """Be the device of all recurrences inside."""
        played, turned = RecurrenceModule.played, RecurrenceModule.reversed

        def limited(half: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return half(*args, **kwargs)

            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecurrenceModule, "played", limited(played))
            patch.setattr(RecurrenceModule, "reversed", limited(turned))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._count(each, before)
        self.peak = max(self.peak, self.alive)
        if self.alive > self.nbytes:
            self.failed += 1
            result = None
            raise torch.OutOfMemoryError(f"{self.alive} bytes would be alive, and there is memory for {self.nbytes}.")
        return result

    def _count(self, made: Tensor, before: set[int]) -> None:
        storage = made.untyped_storage()
        key = storage._cdata
        if key in before or key in self.known:
            return
        self.known[key] = storage.nbytes()
        self.alive += storage.nbytes()
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.alive -= self.known.pop(key)
