"""Memory in which an operation works, and which it frees before it returns: that of convolutions on a CPU.

oneDNN copies operands and results of a convolution into layouts of its own, which takes up to three times as much as
the result. How much depends on shapes, layouts and the machine, so each kind of convolution is run once, and what it
allocates is counted. A GPU's workspaces are not known.

Private torch API, tried on 2.11 and 2.13: ``_enable_profiler_legacy`` and ``_disable_profiler_legacy`` of
``torch._C._autograd``, with ``ProfilerConfig``, ``ProfilerState`` and ``_ExperimentalConfig`` of
``torch._C._profiler``, which count the allocations of a call in a third of a millisecond (the first session of
``torch.profiler`` takes a second), and ``unset_fake_temporarily``.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from reroll.graph.memory import Workspaces, result_nbytes, shapes_of, strided_nbytes
from reroll.graph.nested import tensors_of
from reroll.graph.private import operator_name

_WORKING = ("convolution", "convolution_backward")


def workspaces(graph: fx.Graph) -> Workspaces:
    """Bytes in which operations of an ATen graph work besides their results; the most, if they differ."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for node in graph.nodes:
        target: Any = node.target
        if operator_name(node) in _WORKING and _on_cpu(node):
            nbytes = _workspace(target, _described(node.args), torch.get_num_threads())
            for shape in shapes_of(node.meta["val"]):
                found[str(target), shape] = max(found.get((str(target), shape), 0), nbytes)
    return found


def workspace_of(target: Any, args: Any) -> int:
    """Bytes in which an ATen operation works on these values, which may be fake, besides its result."""
    working = getattr(target.overloadpacket, "__name__", "") in _WORKING
    on_cpu = all(value.device.type == "cpu" for value in tensors_of(args))
    return _workspace(target, _described(tuple(args)), torch.get_num_threads()) if working and on_cpu else 0


def _on_cpu(node: fx.Node) -> bool:
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def _described(value: Any) -> Any:
    """Arguments as something to compare: tensors by shape, strides and dtype."""
    if isinstance(value, fx.Node | Tensor):
        like: Any = value.meta["val"] if isinstance(value, fx.Node) else value
        return _Like((tuple(like.shape), like.stride(), like.dtype))
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


class _Like(tuple[Any, ...]):
    """Shape, strides and dtype of a tensor."""


def _made(value: Any) -> Any:
    if isinstance(value, _Like):
        shape, stride, dtype = value
        base = torch.zeros(strided_nbytes(shape, stride, 1), dtype=dtype)  # what is expanded cannot be written to
        return base.as_strided(shape, stride)
    return [_made(each) for each in value] if isinstance(value, tuple) else value


@cache
def _workspace(target: Any, described: Any, threads: int) -> int:
    """What a run of an operation allocates at most, less its result; 0 where that is not known: while the user
    profiles this thread, or where memory does not suffice."""
    with unset_fake_temporarily(), torch.no_grad():
        try:
            operands = [_made(each) for each in described]
            target(*operands)  # what it keeps for later runs comes first
            result, sizes = _counted(target, operands)
        except (AttributeError, RuntimeError, TypeError):
            return 0
        return max(0, max(accumulate(sizes), default=0) - result_nbytes(result))


def _counted(target: Any, operands: list[Any]) -> tuple[Any, list[int]]:
    """The result of a call, and the bytes that it allocated (positive) and freed, in order."""
    names: Any = torch._C._profiler
    sessions: Any = torch._C._autograd
    own = names.ProfilerConfig(names.ProfilerState.CPU, False, True, False, False, False, names._ExperimentalConfig())
    sessions._enable_profiler_legacy(own)
    try:
        result = target(*operands)
    finally:
        records = sessions._disable_profiler_legacy()
    changes = (each for thread in records for each in thread if each.kind() == "memory_alloc")
    return result, [each.cpu_memory_usage() for each in changes]
