"""Faults of torch's inductor that give wrong gradients in silence, and what keeps reroll's code from them.

- A kernel may write a result over a part of a joined buffer (``torch.cat``) when that part is not read again, but the
  whole buffer then counts as free, and what comes next is written over the result (torch 2.11 to 2.13; spikes of a
  segment of six steps, packed, had one step's bits wrong). Here no result is written over memory that is another
  buffer's (``tests/backends/inductor/test_joined.py``).
- Independent loops that torch 2.13 fuses side by side for a CPU gave wrong gradients behind max pooling. Segments are
  compiled without that fusion (``tests/backends/inductor/test_pooling.py``).

Private torch API, tried on 2.11 and 2.13: ``PythonWrapperCodegen.can_reuse`` (whether a kernel may write its result
over an input), ``config.patch``, ``CustomGraphPass`` (its ``uuid`` tells the code of mended inductor from other code in
the cache on disk).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_MENDED = "reroll: nothing is written over a part of another buffer"


@contextmanager
def mended(settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Inside, inductor has these settings, and its first fault is mended: from then on, for all that it compiles."""
    _keep_parts()
    config: Any = torch._inductor.config
    marked = {"joint_custom_pre_pass": _marker()} if config.joint_custom_pre_pass is None else {}
    with config.patch({**(settings or {}), **marked}):
        yield


@cache
def _keep_parts() -> None:
    """No result is written over a buffer that is memory of another. It stays: plain ``torch.compile`` gains, too."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    can_reuse: Any = PythonWrapperCodegen.can_reuse

    def apart(self: Any, input_buffer: Any, output_buffer: Any = None) -> bool:
        made = input_buffer.node if output_buffer is not None else None
        if made is not None and made.get_inputs_that_alias_output():
            return False
        return bool(can_reuse(self, input_buffer, output_buffer))

    PythonWrapperCodegen.can_reuse = apart  # type: ignore[method-assign]


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
