"""Graphs of halves of segments, made of plain functions, and what the passes leave of them.

T steps, B batch, N inputs, H neurons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.backends.inductor import lower
from reroll.backends.inductor.native_products import register
from reroll.backends.inductor.wrapper_codegen.unit import quick_builds
from reroll.graph.editing import deduplicate
from reroll.program.context import Context
from reroll.program.registry import run_on_half
from reroll.schedules.interval import Interval
from reroll.segment.trace import Traced

T, B, N, H = 5, 3, 4, 6
CONTEXT = Context(Interval(1))
BOTH = ("merge-gradients", "batch-products")
Function = Callable[..., Any]


def traced(function: Function, values: list[Tensor], constants: int) -> fx.GraphModule:
    """The graph of a function whose last ``constants`` arguments are weights."""
    made: fx.GraphModule = make_fx(function, tracing_mode="fake")(*values)
    for node in made.graph.find_nodes(op="placeholder")[len(values) - constants :]:
        node.meta["constant"] = True
    deduplicate(made.graph)
    return made


def run_by_torch(graph: fx.GraphModule, traced: Traced, *, backward: bool) -> Any:
    """A half, in place of what inductor makes of it (``lower._inductor``)."""
    return lower._eager(traced, None, graph, backward=backward)


def compiled(function: Function, *values: Any) -> Any:
    """What inductor makes of a function, its kernels in one translation unit as those of segments are."""
    register()
    run: Any = torch.compile(function, fullgraph=True, dynamic=False)
    with quick_builds():
        return run(*values)


def rewritten(function: Function, values: list[Tensor], constants: int, passes: tuple[str, ...] = BOTH) -> Counter[str]:
    """How often each operation is left, of a function whose results the passes are seen to keep."""
    expected = function(*values)
    found = run_on_half(passes, traced(function, values, constants), CONTEXT)
    for one, other in zip(found(*values), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return kinds(found.graph)


def kinds(graph: fx.Graph) -> Counter[str]:
    """How often each operation is in a graph."""
    targets: list[Any] = [node.target for node in graph.nodes if node.op == "call_function"]
    return Counter(getattr(target, "overloadpacket", target).__name__ for target in targets)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def backward_of(loss: Function, count: int) -> Function:
    """Gradients with respect to the last ``count`` arguments."""

    def half(*values: Tensor) -> Any:
        leaves = [value.detach().requires_grad_() for value in values[-count:]]
        return torch.autograd.grad(loss(*values[:-count], *leaves), leaves)

    return half
