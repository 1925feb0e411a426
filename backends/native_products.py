"""Products with packed weights as kernels among those that inductor writes: called with pointers, built with the rest.

Private torch API, tried on 2.11 and 2.13: ``register_lowering``, ``ExternKernelOut`` (a node that writes into a buffer
which inductor allocates) and what its ``codegen`` may call of the wrapper: ``define_kernel``, ``generate_kernel_call``,
``src_to_kernel`` and ``next_kernel_suffix``; ``parallel_num_threads``, ``pick_vec_isa``.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from reroll.backends.toolchain import quick_builds
from reroll.packed_ops import PACKED_PRODUCT

_HEADER = Path(__file__).with_name("product.h")
_C_TYPES = {torch.float32: "float", torch.float64: "double"}
_SOURCE = """\
#include <torch/csrc/inductor/cpp_prefix.h>
#include "{header}"
// edition {edition}
extern "C" void kernel(const {type}* x, const {type}* panels, {type}* out)
{{
    reroll::product<{type}, {rows}, {columns}, {threads}>(x + {offset}, {stride}, panels, out, {depth});
}}
"""


def stamp(half: fx.GraphModule) -> None:
    """Write into the packed products of a graph which code computes them."""
    for node in half.graph.find_nodes(op="call_function", target=PACKED_PRODUCT):
        node.args = (*node.args[:-1], edition())
    half.recompile()


@cache
def edition() -> int:
    """A number that tells one text, and one place, of the kernel from another."""
    told = f"{_HEADER} {_HEADER.read_text('utf-8')} {_SOURCE}"
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")


@cache
def register() -> None:
    """Tell inductor how ``packed_product`` is computed."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.utils import parallel_num_threads

    class PackedProduct(ir.ExternKernelOut):
        """x (M, K) and panels -> (M, N)."""

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and the kernel where no other call has written it."""
            operands: Any = self.inputs
            x, panels = operands
            layout, kind = x.get_layout(), _C_TYPES[x.get_dtype()]
            types = [f"const {kind}*", f"const {kind}*", f"{kind}*"]
            source = _source(layout, int(self.get_size()[1]), parallel_num_threads())
            name = wrapper.src_to_kernel.get(source)
            if name is None:
                name = wrapper.src_to_kernel[source] = f"packed_product_{wrapper.next_kernel_suffix()}"
                wrapper.define_kernel(name, f"async_compile.cpp_pybinding({types}, r'''{source}''')", gpu=False)
            arguments = [x.get_name(), panels.get_name(), self.get_name()]
            wrapper.generate_kernel_call(name, arguments, triton=False, arg_types=types)

    def lowered(x: Any, panels: Any, columns: int, edition: int) -> Any:
        x, panels = _rows(x), ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(panels))
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [x.get_size()[0], columns])
        return ir.TensorBox.create(PackedProduct(layout, [x, panels]))

    register_lowering(PACKED_PRODUCT, type_promotion_kind=None)(lowered)


def _rows(x: Any) -> Any:
    """An operand in memory, each row in one piece of a buffer of its own dtype; it may be part of a larger one."""
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    x = ExternKernel.require_stride_order(ExternKernel.realize_input(x), [1, 0])
    if V.graph.get_dtype(x.get_name()) == x.get_dtype() and x.get_layout().stride[-1] == 1:
        return x
    return ExternKernel.require_contiguous(ExternKernel.copy_input(x))


def _source(x: Any, columns: int, threads: int) -> str:
    """The kernel for a product with ``columns`` of rows that lie as the layout ``x`` says."""
    (rows, depth), (stride, _) = map(int, x.size), map(int, x.stride)
    return _SOURCE.format(
        header=_HEADER,
        edition=edition(),
        type=_C_TYPES[x.dtype],
        rows=rows,
        columns=columns,
        threads=threads,
        offset=int(x.offset),
        stride=stride,
        depth=depth,
    )


def vectors() -> bool:
    """Whether inductor compiles for a CPU whose vectors ``product.h`` is made for."""
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, pick_vec_isa

    with quick_builds():
        return isinstance(pick_vec_isa(), VecAVX2 | VecAVX512)
