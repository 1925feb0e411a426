"""Products with weights that are laid out for them once, as operations of a graph.

``pack_weight``: w (K, N) -> panels (P, K, W): panel p holds columns p W to (p + 1) W, rows of 128 bytes, the last one
padded with zeros. ``packed_product``: x (M, K), panels, N -> x w (M, N). ``edition`` names the code that computes it,
so that what torch compiled for another edition is not taken from its cache.

What is written here is what they give, by torch's own product. Compiled, ``packed_product`` is a kernel among
inductor's (``backends/native_products.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ROW = 128  # bytes
LIBRARY = torch.library.Library("reroll", "FRAGMENT")
LIBRARY.define("pack_weight(Tensor w) -> Tensor")
LIBRARY.define("packed_product(Tensor x, Tensor panels, int columns, int edition) -> Tensor")
LIBRARY.define(
    "packed_event_product(Tensor x, Tensor panels, Tensor? counts, int columns, float crossover, int edition) -> Tensor"
)


@torch.library.impl(LIBRARY, "pack_weight", "CompositeExplicitAutograd")
def _pack(w: Tensor) -> Tensor:
    width = _ROW // w.element_size()
    rest = -w.shape[1] % width
    padded = functional.pad(w, (0, rest)) if rest else w
    panels: Tensor = padded.unflatten(1, (-1, width)).transpose(0, 1)
    return panels.clone(memory_format=torch.contiguous_format)


@torch.library.impl(LIBRARY, "packed_product", "CompositeExplicitAutograd")
def _product(x: Tensor, panels: Tensor, columns: int, edition: int) -> Tensor:
    return x @ panels.transpose(0, 1).flatten(1)[:, :columns]


@torch.library.impl(LIBRARY, "packed_event_product", "CompositeExplicitAutograd")
def _event_product(
    x: Tensor, panels: Tensor, counts: Tensor | None, columns: int, crossover: float, edition: int
) -> Tensor:
    """The dense product counts nothing."""
    return _product(x, panels, columns, edition)


def _fake_pack(w: Tensor) -> Tensor:
    width = _ROW // w.element_size()
    return w.new_empty((-(-w.shape[1] // width), w.shape[0], width))


def _fake_product(x: Tensor, panels: Tensor, columns: int, edition: int) -> Tensor:
    return x.new_empty((x.shape[0], columns))


def _fake_event_product(
    x: Tensor, panels: Tensor, counts: Tensor | None, columns: int, crossover: float, edition: int
) -> Tensor:
    return x.new_empty((x.shape[0], columns))


torch.library.register_fake("reroll::pack_weight", _fake_pack, lib=LIBRARY)
torch.library.register_fake("reroll::packed_product", _fake_product, lib=LIBRARY)
torch.library.register_fake("reroll::packed_event_product", _fake_event_product, lib=LIBRARY)

PACK, PACKED_PRODUCT = torch.ops.reroll.pack_weight.default, torch.ops.reroll.packed_product.default
PACKED_EVENTS = torch.ops.reroll.packed_event_product.default
