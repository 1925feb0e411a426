"""The faults that ``compiled_mutants.py`` switches on one at a time: in what writes compiled segments, and in later
calls of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from proof_faults import FAULTS as RUNNING
from proof_faults import Fault
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.scheduler import Scheduler

import reroll.backends.inductor.half as half
import reroll.backends.inductor.whole as whole
from reroll.backends.inductor import inductor_workarounds

_CHAINS, _NATIVE = "backends.inductor.wrapper_codegen.chains", "backends.inductor.native_products"
_PACKING, _WEIGHTS = "segment.packing", "passes.segment.pack_weights"
_CPP = "torch._inductor.codegen.cpp"

FAULTS: Mapping[str, Fault] = {
    # Calls of kernels that become one.
    "operands and results of a call share bytes": Fault(
        f"{_CHAINS}:_place", "o.last >= buffer.first", "o.last > buffer.first"
    ),
    "buffers are as large as their first line": Fault(
        f"{_CHAINS}:_place", "(other.place + other.nbytes)", "(other.place + min(other.nbytes, 64))"
    ),
    "parts of a part begin where that does": Fault(
        f"{_CHAINS}:Chain._ref", "source.offset + operand.offset", "source.offset"
    ),
    "parts behind a chain begin at the start": Fault(f"{_CHAINS}:_Writer._bind", "{ref.offset})", "0)"),
    "the last call of a chain is left out": Fault(
        f"{_CHAINS}:_definition", "for name, operands in calls:", "for name, operands in calls[:-1] or calls:"
    ),
    "two calls of a chain change places": Fault(
        f"{_CHAINS}:_definition",
        "for name, operands in calls:",
        "for name, operands in [*calls[:-2], *calls[:-3:-1]]:",
    ),
    "a chain reads the first operand twice": Fault(
        f"{_CHAINS}:Chain.add",
        "for each in operands])",
        "for each in (operands if len(operands) < 4 else [operands[0], operands[0], *operands[2:]])])",
    ),
    # Products with packed weights, and what is packed into bits.
    "products read from the start of a buffer": Fault(f"{_NATIVE}:_kernel", '"offset": x.offset}', '"offset": 0}'),
    "rows of a product lie one behind another": Fault(f"{_NATIVE}:_kernel", '"stride": stride,', '"stride": depth,'),
    "products leave their last factor out": Fault(f"{_NATIVE}:_kernel", "depth=int(depth)", "depth=int(depth) - 1"),
    "a bias is left out": Fault(f"{_WEIGHTS}:_pack", "if bias is not None:", "if bias is None and product is None:"),
    "all products have the first weight": Fault(
        f"{_WEIGHTS}:_pack", "left, packed[right], columns, 0)", "left, next(iter(packed.values())), columns, 0)"
    ),
    "two values have one bit": Fault(
        f"{_PACKING}:_pack",
        "bitwise_left_shift.Tensor_Scalar, bit, place)",
        "bitwise_left_shift.Tensor_Scalar, bit, max(place - 1, 0))",
    ),
    "a value is read with its neighbour": Fault(f"{_PACKING}:_unpack", "bit, 1)", "bit, 3)"),
    "what is 0 or another value is packed": Fault(f"{_PACKING}:_is_binary", "fact.binary and ", ""),
    "invariants of a half are in another order": Fault(
        "segment.invariants:Once.values", "return found", "return found[::-1]"
    ),
    # A compiler that is wrong.
    "vectors are wrong in a sigmoid": Fault(
        f"{_CPP}:CppVecOverrides.sigmoid", "{x}.neg().exp())", "({x}*decltype({x})(1.001)).neg().exp())"
    ),
    "the rest of a vector is wrong in a sigmoid": Fault(
        f"{_CPP}:CppOverrides.sigmoid", "std::exp(-{x}))", "std::exp({x}))"
    ),
    "the rest of a vector is wrong in a tanh": Fault(f"{_CPP}:CppOverrides.tanh", "std::tanh({x})", "{x}"),
    "comparisons allow equality": Fault(
        f"{_CPP}:CppVecOverrides.gt", "({x} > {y})", "({x} > {y} - decltype({y})(0.05))"
    ),
    "tanh has half of its gradient": Fault(
        "torch._decomp.decompositions:tanh_backward", "(1 - y * y)", "(1 - 0.5 * y * y)"
    ),
    "sigmoid has the gradient of its square": Fault(
        "torch._decomp.decompositions:sigmoid_backward", "y * (1 - y)", "y * y * (1 - y)"
    ),
    "results lie over what is read again": Fault(
        "torch._inductor.scheduler:BaseSchedulerNode.decide_inplace_update",
        "len(remaining_uses) == 1",
        "len(remaining_uses) >= 1",
    ),
}


def _original(patched: Any) -> Any:
    """What a mend of ``inductor_workarounds.py`` has replaced."""
    cells = patched.__closure__ or ()
    return next((each.cell_contents for each in cells if callable(each.cell_contents)), patched)


@contextmanager
def _parts() -> Iterator[None]:
    with inductor_workarounds.mended():
        before = _original(PythonWrapperCodegen.can_reuse)
    with mock.patch.object(PythonWrapperCodegen, "can_reuse", before):
        yield


@contextmanager
def _scatters() -> Iterator[None]:
    with inductor_workarounds.mended():
        before = _original(Scheduler.can_fuse_vertical)
    with mock.patch.object(Scheduler, "can_fuse_vertical", before):
        yield


@contextmanager
def _side_by_side() -> Iterator[None]:
    """Independent loops are fused for a CPU, as many as inductor does by itself."""
    most = "cpp.max_horizontal_fusion_size"

    def without(settings: Mapping[str, Any] | None = None) -> Any:
        return inductor_workarounds.mended({key: value for key, value in (settings or {}).items() if key != most})

    with mock.patch.object(half, "mended", without), mock.patch.object(whole, "mended", without):
        yield


UNMENDED: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "known: a result over a part of a joined buffer": _parts,
    "known: what is to be scattered is read": _scatters,
    "known: loops side by side": _side_by_side,
}

LATER: Mapping[str, Fault] = {
    **{name: each for name, each in RUNNING.items() if each.where.startswith("backends.runtime")},
    "invariants are those of the first call": Fault(
        "segment.invariants:Once.values",
        "found: list[Tensor] = self._run(*constants)\n",
        "found = vars(self).setdefault('kept', self._run(*map(torch.ones_like, constants)))\n",
    ),
    "a sum of gradients lies in the memory of another": Fault(
        "backends.runtime.gradients:Gradients._zeros",
        "else torch.zeros_like(like)",
        "else globals().setdefault(f'kept {tuple(like.shape)} {like.dtype}', torch.zeros_like(like))",
    ),
    "carries are those of another call": Fault(
        "backends.runtime.run:Start.of",
        "return cls(tuple(operands),",
        "return cls((operands[0].detach() * 0.5, *operands[1:]),",
    ),
}
