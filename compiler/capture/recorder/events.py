"""What a run of a model that is only looked at leaves: of autograd's history, of a function, and of a scan.

Such a run never goes backward, but needs gradients on, as models ask for them. Its graph of nodes would grow with the
run, and small nodes that stay among tensors that go break the heap into pieces: over 8,192 steps of network D2r
(``benchmarks/network_d.py``) the process grew by 1.4 GB, in 2.5 times the time. So autograd's history of what a run
makes is kept short.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from reroll.graph.private import base_of

SCAN = torch.ops.higher_order.scan
_EVERY = 128


def noted_for_backward(result: Any) -> dict[str, Any]:
    """What an ``autograd.Function`` has noted for its backward."""
    return next((vars(t.grad_fn) for t in _tensors(result) if hasattr(t.grad_fn, "__dict__")), {})


def _tensors(result: Any) -> list[Tensor]:
    items = result if isinstance(result, tuple | list) else (result,)
    return [item for item in items if isinstance(item, Tensor)]


def step_by_step(
    combine: Callable[..., Any], initial: Sequence[Tensor], xs: Sequence[Tensor], constants: Sequence[Tensor]
) -> list[Tensor]:
    """What ``torch.scan`` does, as the operations of its steps."""
    carry, rows = list(initial), []
    for t in range(xs[0].shape[0]):
        results = combine(*carry, *(x[t] for x in xs), *constants)
        carry = list(results[: len(initial)])
        rows.append(results[len(initial) :])
    return [*carry, *(torch.stack(column) for column in zip(*rows, strict=True))]


class History:
    """Cuts tensors that were made a while ago off their history; they stay non-leaves that require gradients.

    Only tensors that the run made itself are cut, and none of which there are views: those look at its history.
    ``changed`` is told of those that were.
    """

    def __init__(self, changed: Callable[[list[Tensor]], None] = lambda _: None) -> None:
        self.changed = changed
        self.recent: list[weakref.ref[Tensor]] = []
        self.views: dict[int, list[weakref.ref[Tensor]]] = {}
        self.foreign: set[int] = set()
        self.leaf = torch.zeros(0, requires_grad=True)

    def keep(self, value: Tensor) -> None:
        """A tensor that the run did not make."""
        self.foreign.add(id(value))

    def made(self, value: Tensor, known: weakref.ref[Tensor]) -> None:
        """A tensor that an operation gave."""
        base = base_of(value)
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
        kept = self.views.keys() | self.foreign
        cut = [value for value in alive if id(value) not in kept and _has_history(value)]
        with torch.enable_grad():
            for value in cut:
                value.detach_()
                value.as_strided((0,), (1,)).copy_(self.leaf)  # a new history: that of nothing
        self.changed(cut)


def _has_history(value: Tensor) -> bool:
    return type(value) is Tensor and base_of(value) is None and not value.is_leaf and value.layout == torch.strided
