"""The operations that reroll adds to torch: products by events, and products with packed weights.

Products with an operand that is mostly zeros, as spikes are:

``event_product``: bias (N,) or none, z (M, K), w (K, N) -> bias + z w. ``event_outer``: z (M, K), g (M, N) -> z^T g.
``event_outer_add``: total (K, N), row by row -> whether z^T g was added to it; nothing is done where z has too many
events. ``event_rows``: a weight laid out row by row, to be gathered from. What is written here is what they give, by
torch's dense products. ``backends/inductor/native/event_kernels.cpp`` is what runs on a CPU once it is built: rows of w
(or g) are added up for the elements of z that are not zero, unless these are more than ``crossover`` of all. That is
read off z at each call, so the same call gives the same bits. Rounding apart, results differ only where a weight is not
finite: 0 * inf is skipped.

``number`` is the row of the table of counts that ``event_count`` names for what this thread runs until it is called
again, with an empty one to end it: (calls, calls by events, elements of z, those that are not zero).

Products with weights that are laid out for them once. ``pack_weight``: w (K, N) -> panels (P, K, W): panel p holds
columns p W to (p + 1) W, rows of 128 bytes, the last one padded with zeros. ``packed_product``: x (M, K), panels, N ->
x w (M, N). ``edition`` names the code that computes it, so that what torch compiled for another edition is not taken
from its cache. Compiled, it is a kernel among inductor's (``reroll.backends.inductor.native_products``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_PARAMETER = re.compile(r"[lL]_\w+?_(?:modules_(\w+?)_)?parameters_(\w+)_")
_SCHEMAS = (
    "event_product(Tensor? bias, Tensor z, Tensor w, float crossover, int number) -> Tensor",
    "event_outer(Tensor z, Tensor g, float crossover, int number) -> Tensor",
    "event_outer_add(Tensor(a!) total, Tensor z, Tensor g, float crossover, int number) -> bool",
    "event_rows(Tensor w) -> Tensor",
    "event_count(Tensor counts) -> ()",
    "pack_weight(Tensor w) -> Tensor",
    "packed_product(Tensor x, Tensor panels, int columns, int edition) -> Tensor",
    "packed_event_product"
    "(Tensor x, Tensor panels, Tensor? counts, int columns, float crossover, int edition) -> Tensor",
)
_ROW = 128  # bytes of a row of a panel
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


@torch.library.impl(LIBRARY, "pack_weight", "CompositeExplicitAutograd")
def _pack(w: Tensor) -> Tensor:
    width = _ROW // w.element_size()
    rest = -w.shape[1] % width
    padded = functional.pad(w, (0, rest)) if rest else w
    panels: Tensor = padded.unflatten(1, (-1, width)).transpose(0, 1)
    return panels.clone(memory_format=torch.contiguous_format)


@torch.library.impl(LIBRARY, "packed_product", "CompositeExplicitAutograd")
def _packed_product(x: Tensor, panels: Tensor, columns: int, edition: int) -> Tensor:
    return x @ panels.transpose(0, 1).flatten(1)[:, :columns]


@torch.library.impl(LIBRARY, "packed_event_product", "CompositeExplicitAutograd")
def _packed_events(
    x: Tensor, panels: Tensor, counts: Tensor | None, columns: int, crossover: float, edition: int
) -> Tensor:
    """The dense product counts nothing."""
    return _packed_product(x, panels, columns, edition)


def _fake_pack(w: Tensor) -> Tensor:
    width = _ROW // w.element_size()
    return w.new_empty((-(-w.shape[1] // width), w.shape[0], width))


def _fake_packed_product(x: Tensor, panels: Tensor, columns: int, edition: int) -> Tensor:
    return x.new_empty((x.shape[0], columns))


def _fake_packed_events(
    x: Tensor, panels: Tensor, counts: Tensor | None, columns: int, crossover: float, edition: int
) -> Tensor:
    return x.new_empty((x.shape[0], columns))


torch.library.register_fake("reroll::pack_weight", _fake_pack, lib=LIBRARY)
torch.library.register_fake("reroll::packed_product", _fake_packed_product, lib=LIBRARY)
torch.library.register_fake("reroll::packed_event_product", _fake_packed_events, lib=LIBRARY)
PACK, PACKED_PRODUCT = torch.ops.reroll.pack_weight.default, torch.ops.reroll.packed_product.default
PACKED_EVENTS = torch.ops.reroll.packed_event_product.default


@dataclass(frozen=True, slots=True)
class EventCount:
    """Products of one kind with operands of ``k`` columns and results of ``n``, in the last call.

    ``kind`` is "product" with ``weight``, or "gradient" of it. Of ``elements`` of the operands ``events`` were not
    zero; of ``calls``, ``by_events`` were few enough.
    """

    kind: str
    weight: str
    k: int
    n: int
    calls: int
    by_events: int
    elements: int
    events: int

    def describe(self) -> str:
        """One line: what it is, the density, and what was chosen."""
        which = f"{'with' if self.kind == 'product' else 'of'} {parameter_name(self.weight) or 'a value'}"
        what = f"{self.kind} {which}, {self.k} x {self.n}"
        if not self.calls:
            return f"{what}: not run yet"
        chosen = f"{self.by_events:,} of {self.calls:,} in the last call by events"
        return f"{what}: {100 * self.events / max(self.elements, 1):.3g} % are not zero, {chosen}"


def parameter_name(name: str) -> str:
    """The name that a parameter has in its module, of Dynamo's name of it; another name as it is."""
    found = _PARAMETER.fullmatch(name)
    return ".".join([*filter(None, (found[1] or "").split("_modules_")), found[2]]) if found else name
