"""Autograd's history of what a run makes, kept short.

A run that is only looked at never goes backward, but needs gradients on, as models ask for them. Its graph of nodes
would grow with the run, and small nodes that stay among tensors that go break the heap into pieces: over 8,192 steps of
network D2r (``benchmarks/network_d.py``) the process grew by 1.4 GB, in 2.5 times the time.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_EVERY = 128


class History:
    """Cuts tensors that were made a while ago off their history; they stay non-leaves that require gradients.

    Only tensors that the run made itself are cut, and none of which there are views: those look at its history.
    """

    def __init__(self) -> None:
        self.recent: list[weakref.ref[Tensor]] = []
        self.views: dict[int, list[weakref.ref[Tensor]]] = {}
        self.foreign: set[int] = set()
        self.leaf = torch.zeros(0, requires_grad=True)

    def keep(self, value: Tensor) -> None:
        """A tensor that the run did not make."""
        self.foreign.add(id(value))

    def made(self, value: Tensor, known: weakref.ref[Tensor]) -> None:
        """A tensor that an operation gave."""
        base = value._base
        if base is not None:
            if id(base) not in self.foreign:
                self.views.setdefault(id(base), []).append(known)
        elif value.requires_grad:
            self.recent.append(known)
            if len(self.recent) >= _EVERY:
                self._cut()

    def _cut(self) -> None:
        alive = [value for known in self.recent if (value := known()) is not None]
        self.recent.clear()
        views = {base: [known for known in found if known() is not None] for base, found in self.views.items()}
        self.views = {base: found for base, found in views.items() if found}
        with torch.enable_grad():
            for value in alive:
                if id(value) not in self.views and id(value) not in self.foreign and _has_history(value):
                    value.detach_()
                    value.as_strided((0,), (1,)).copy_(self.leaf)  # a new history: that of nothing


def _has_history(value: Tensor) -> bool:
    return type(value) is Tensor and not value.is_leaf and value._base is None and value.layout == torch.strided
