"""Faults of torch's inductor that give wrong gradients in silence, and what keeps reroll's code from them.

- A kernel may write a result over a part of a joined buffer (``torch.cat``) when that part is not read again, but the
  whole buffer then counts as free, and what comes next is written over the result (torch 2.11 to 2.13; spikes of a
  segment of six steps, packed, had one step's bits wrong). Here no result is written over memory that is another
  buffer's (``tests/backends/inductor/test_joined.py``).
- A loop that reads a buffer may be fused with the one that has scattered into it, at places that are known at run time
  alone, and reads what was to be scattered in place of what lies there: the name of a buffer before it was changed is
  not taken for that behind (torch 2.11 to 2.13; the gradient of ``sort`` in the third step and later). Here loops that
  scatter are not fused with those that read or write the same memory (``tests/backends/inductor/test_scattered.py``).
- A loop whose sizes are computed anew, so that it can be fused with another, reads buffers by the names that they had
  before they were changed, and may run before that change (torch 2.13; values and gradients of a loop whose steps send
  what they carry: what a collective in place gives was read before it was there). Here it keeps the names that it had
  (``tests/backends/processes/test_proofs.py``).
- Independent loops that torch 2.13 fuses side by side for a CPU gave wrong gradients behind max pooling. Segments are
  compiled without that fusion (``tests/backends/inductor/test_pooling.py``).

Private torch API, tried on 2.11 and 2.13: ``PythonWrapperCodegen.can_reuse`` (whether a kernel may write its result
over an input), ``Scheduler.can_fuse_vertical`` with ``mutation_real_name``, ``free_symbol_is_type`` and ``SymT.TMP``
(an index that is known at run time alone), ``SchedulerNode.recompute_size_and_body`` with ``mutation_renames`` (the
names of buffers behind the changes that a loop sees), ``config.patch``, ``CustomGraphPass`` (its ``uuid`` tells the
code of mended inductor from other code in the cache on disk).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_MENDED = (
    "reroll: nothing is written over a part of another buffer, fused with what scatters into it, or read too early"
)


@contextmanager
def mended(settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Inside, inductor has these settings, and its first three faults are mended: from then on, for all it compiles."""
    _keep_parts()
    _keep_scatters()
    _keep_names()
    config: Any = torch._inductor.config
    marked = {"joint_custom_pre_pass": _marker()} if config.joint_custom_pre_pass is None else {}
    with config.patch({**(settings or {}), **marked}):
        yield


@cache
def _keep_parts() -> None:
    """No result is written over a buffer that is memory of another. It stays: plain ``torch.compile`` gains, too."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    can_reuse: Any = PythonWrapperCodegen.can_reuse

    def allowed(self: Any, input_buffer: Any, output_buffer: Any = None) -> bool:
        made = input_buffer.node if output_buffer is not None else None
        if made is not None and made.get_inputs_that_alias_output():
            return False
        return bool(can_reuse(self, input_buffer, output_buffer))

    PythonWrapperCodegen.can_reuse = allowed  # type: ignore[method-assign]


@cache
def _keep_scatters() -> None:
    """Loops that scatter stand apart from those that read or write the same memory. It stays, too."""
    from torch._inductor.scheduler import Scheduler

    can_fuse: Any = Scheduler.can_fuse_vertical

    def allowed(self: Any, node1: Any, node2: Any, **options: Any) -> bool:
        return bool(can_fuse(self, node1, node2, **options)) and not (
            _scattered(self, node1) & _touched(self, node2) or _scattered(self, node2) & _touched(self, node1)
        )

    Scheduler.can_fuse_vertical = allowed  # type: ignore[method-assign]


@cache
def _keep_names() -> None:
    """A loop reads what it read before its sizes were computed anew. It stays, too."""
    from torch._inductor.scheduler import SchedulerNode

    recompute: Any = SchedulerNode.recompute_size_and_body

    def named(self: Any, *args: Any, **options: Any) -> None:
        recompute(self, *args, **options)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = named  # type: ignore[method-assign]


def _scattered(scheduler: Any, node: Any) -> set[str]:
    """The memory into which a loop writes at places that are known at run time alone."""
    from torch.utils._sympy.symbol import SymT, free_symbol_is_type

    writes = (each for each in node.read_writes.writes if getattr(each, "index", None) is not None)
    return {_memory(scheduler, each) for each in writes if free_symbol_is_type(each.index, SymT.TMP)}


def _touched(scheduler: Any, node: Any) -> set[str]:
    """The memory that a loop reads and writes."""
    return {_memory(scheduler, each) for each in (*node.read_writes.reads, *node.read_writes.writes)}


def _memory(scheduler: Any, access: Any) -> str:
    """The buffer whose memory is read or written, under whatever name."""
    return str(scheduler.mutation_real_name.get(access.name, access.name))


@cache
def _marker() -> Any:
    """A pass that does nothing, and by which the cache on disk tells mended code from what was compiled before."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Marker(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            """Nothing."""

        def uuid(self) -> str:
            return _MENDED

    return Marker()
