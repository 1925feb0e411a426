"""Products with an operand that is mostly zeros, as spikes are, as operations of a graph.

``event_product``: bias (N,) or none, z (M, K), w (K, N) -> bias + z w. ``event_outer``: z (M, K), g (M, N) -> z^T g.
``event_outer_add``: total (K, N), row by row -> whether z^T g was added to it; nothing is done where z has too many
events.
``event_rows``: a weight laid out row by row, to be gathered from. What is written here is what they give, by torch's
dense products. ``backends/event_kernels.cpp`` is what runs on a CPU once it is built: rows of w (or g) are added up
for the elements of z that are not zero, unless these are more than ``crossover`` of all. That is read off z at each
call, so the same call gives the same bits. Rounding apart, results differ only where a weight is not finite: 0 * inf
is skipped.

``number`` is the row of the table of counts that ``event_count`` names for what this thread runs until it is called
again, with an empty one to end it: (calls, calls by events, elements of z, those that are not zero).
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCHEMAS = (
    "event_product(Tensor? bias, Tensor z, Tensor w, float crossover, int number) -> Tensor",
    "event_outer(Tensor z, Tensor g, float crossover, int number) -> Tensor",
    "event_outer_add(Tensor(a!) total, Tensor z, Tensor g, float crossover, int number) -> bool",
    "event_rows(Tensor w) -> Tensor",
    "event_count(Tensor counts) -> ()",
)
LIBRARY = torch.library.Library("reroll", "FRAGMENT")
for _schema in _SCHEMAS:
    LIBRARY.define(_schema)


@torch.library.impl(LIBRARY, "event_product", "CompositeExplicitAutograd")
def _product(bias: Tensor | None, z: Tensor, w: Tensor, crossover: float, number: int) -> Tensor:
    return torch.mm(z, w) if bias is None else torch.addmm(bias, z, w)


@torch.library.impl(LIBRARY, "event_outer", "CompositeExplicitAutograd")
def _outer(z: Tensor, g: Tensor, crossover: float, number: int) -> Tensor:
    return torch.mm(z.t(), g)


@torch.library.impl(LIBRARY, "event_outer_add", "CompositeExplicitAutograd")
def _outer_add(total: Tensor, z: Tensor, g: Tensor, crossover: float, number: int) -> bool:
    return False


@torch.library.impl(LIBRARY, "event_rows", "CompositeExplicitAutograd")
def _rows(w: Tensor) -> Tensor:
    return w.clone(memory_format=torch.contiguous_format)


@torch.library.impl(LIBRARY, "event_count", "CompositeExplicitAutograd")
def _count(counts: Tensor) -> None:
    """The dense products count nothing."""


def _fake_product(bias: Tensor | None, z: Tensor, w: Tensor, crossover: float, number: int) -> Tensor:
    return z.new_empty((z.shape[0], w.shape[1]))


def _fake_outer(z: Tensor, g: Tensor, crossover: float, number: int) -> Tensor:
    return z.new_empty((z.shape[1], g.shape[1]))


def _fake_rows(w: Tensor) -> Tensor:
    return w.new_empty(w.shape)


torch.library.register_fake("reroll::event_product", _fake_product, lib=LIBRARY)
torch.library.register_fake("reroll::event_outer", _fake_outer, lib=LIBRARY)
torch.library.register_fake("reroll::event_rows", _fake_rows, lib=LIBRARY)

PRODUCT, OUTER = torch.ops.reroll.event_product.default, torch.ops.reroll.event_outer.default
OUTER_ADD = torch.ops.reroll.event_outer_add.default
ROWS = torch.ops.reroll.event_rows.default
