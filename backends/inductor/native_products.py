"""Products with packed weights as kernels among those that inductor writes: called with pointers, built with the rest.

Private torch API of ``_inductor``, tried on 2.11 and 2.13: ``register_lowering``, ``ir``, ``ExternKernelOut`` (a node
that writes into a buffer which inductor allocates) and what its ``codegen`` may call of the wrapper: ``define_kernel``,
``generate_kernel_call``, ``src_to_kernel`` and ``next_kernel_suffix``; ``pexpr`` (how it writes a size);
``parallel_num_threads``, ``V`` (the graph that is being written), ``pick_vec_isa`` with ``VecAVX2`` and ``VecAVX512``
(the vectors that our kernels are made for).
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from reroll.backends.inductor.wrapper_codegen.machine import able
from reroll.backends.inductor.wrapper_codegen.unit import quick_builds
from reroll.errors import warn
from reroll.segment.ops import PACKED_EVENTS, PACKED_PRODUCT

_FOLDER = Path(__file__).parent / "native"
_HEADERS = ("product.h", "events.h", "event_product.h")
_C_TYPES = {torch.float32: "float", torch.float64: "double"}
_DENSE = """\
#include <torch/csrc/inductor/cpp_prefix.h>
#include "{folder}/product.h"
// edition {edition}
extern "C" void kernel(const {type}* x, const {type}* panels, {type}* out{sizes})
{{
    reroll::product<{type}, {fixed}, {threads}>(x + {offset}, {stride}, panels, out, {depth}, {rows}, {columns});
}}
"""
_EVENTS = """\
#include <torch/csrc/inductor/cpp_prefix.h>
#include "{folder}/event_product.h"
// edition {edition}
extern "C" void kernel(const {type}* x, const {type}* panels, int64_t* counts, {type}* out{sizes})
{{
    reroll::event_product<{type}, {known}, {columns}, {depth}, {threads}>(
        x + {offset}, {stride}, panels, counts, out, {crossover}, {rows});
}}
"""


def stamp(half: fx.GraphModule) -> None:
    """Write into the packed products of a graph which code computes them."""
    for node in half.graph.nodes:
        if node.target in (PACKED_PRODUCT, PACKED_EVENTS):
            node.args = (*node.args[:-1], edition())
    half.recompile()


@cache
def edition() -> int:
    """A number that tells one text, and one place, of the kernels from another."""
    told = " ".join([str(_FOLDER), _DENSE, _EVENTS, *((_FOLDER / name).read_text("utf-8") for name in _HEADERS)])
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")


@cache
def register() -> None:
    """Tell inductor how products with packed weights are computed."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    class PackedProduct(ir.ExternKernelOut):
        """x (M, K), panels and what else its kernel reads -> (M, N)."""

        crossover: float | None = None

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and the kernel where no other call has written it."""
            operands: Any = self.inputs
            kernel = _kernel(operands[0].get_layout(), int(self.get_size()[1]), self.crossover)
            name = wrapper.src_to_kernel.get(kernel.source)
            if name is None:
                kind = "packed_product" if self.crossover is None else "packed_events"
                name = wrapper.src_to_kernel[kernel.source] = f"{kind}_{wrapper.next_kernel_suffix()}"
                definition = f"async_compile.cpp_pybinding({kernel.types}, r'''{kernel.source}''')"
                wrapper.define_kernel(name, definition, gpu=False)
            arguments = [*(operand.get_name() for operand in operands), self.get_name(), *kernel.sizes]
            wrapper.generate_kernel_call(name, arguments, triton=False, arg_types=kernel.types)

    def product(x: Any, panels: Any, columns: int, *more: Any) -> PackedProduct:
        """All but x are buffers of their own, from their first byte on."""
        x, panels = _rows(x), ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(panels))
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [x.get_size()[0], columns])
        return PackedProduct(layout, [x, panels, *map(ir.ExternKernel.realize_input, more)])

    def dense(x: Any, panels: Any, columns: int, edition: int) -> Any:
        return ir.TensorBox.create(product(x, panels, columns))

    def events(x: Any, panels: Any, counts: Any, columns: int, crossover: float, edition: int) -> Any:
        made = product(x, panels, columns, counts)
        made.crossover = crossover
        return ir.TensorBox.create(made)

    register_lowering(PACKED_PRODUCT, type_promotion_kind=None)(dense)
    register_lowering(PACKED_EVENTS, type_promotion_kind=None)(events)


def _rows(x: Any) -> Any:
    """An operand in memory, each row in one piece of a buffer of its own dtype; it may be part of a larger one."""
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    x = ExternKernel.require_stride_order(ExternKernel.realize_input(x), [1, 0])
    if V.graph.get_dtype(x.get_name()) == x.get_dtype() and x.get_layout().stride[-1] == 1:
        return x
    return ExternKernel.require_contiguous(ExternKernel.copy_input(x))


class _Kernel(NamedTuple):
    """C types and text of a kernel, and what it is given of sizes behind its tensors, as the wrapper has it."""

    types: list[str]
    source: str
    sizes: list[str]


def _kernel(x: Any, columns: int, crossover: float | None) -> _Kernel:
    """The kernel for a product with ``columns`` of rows that lie as the layout ``x`` says.

    crossover: by events up to this density; None: dense. Where sizes are symbols it takes them as numbers.
    """
    from torch._inductor.codegen.wrapper import pexpr
    from torch._inductor.utils import parallel_num_threads

    (rows, depth), (stride, _), kind = x.size, x.stride, _C_TYPES[x.dtype]
    given = {"rows": rows, "stride": stride, "offset": x.offset}
    known = all(isinstance(each, int) or each.is_number for each in given.values())
    source = (_DENSE if crossover is None else _EVENTS).format(
        folder=_FOLDER,
        edition=edition(),
        type=kind,
        known=int(rows) if known else 0,
        fixed=f"{int(rows)}, {columns}" if known else "0, 0",
        columns=columns,
        threads=parallel_num_threads(),
        depth=int(depth),
        crossover=crossover,
        sizes="" if known else "".join(f", const int64_t {name}" for name in given),
        **{name: int(value) if known else name for name, value in given.items()},
    )
    types = [f"const {kind}*", f"const {kind}*", *([] if crossover is None else ["int64_t*"]), f"{kind}*"]
    sizes = [] if known else [pexpr(value) for value in given.values()]
    return _Kernel(types + ["const int64_t"] * len(sizes), source, sizes)


def vectors() -> bool:
    """Whether inductor compiles for a CPU whose vectors the kernels are made for. A RerollWarning where it might."""
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, pick_vec_isa

    with quick_builds():
        found = pick_vec_isa()
        if not found and (sets := able()):
            warn(
                f"Segments are compiled without vector instructions, and run slower: no program with those of this "
                f"processor ({', '.join(sets)}) could be built and loaded. python -m reroll doctor looks at the disk "
                "and the compiler; where they are in order the machine was busy: start the process again.",
            )
    return isinstance(found, VecAVX2 | VecAVX512)
