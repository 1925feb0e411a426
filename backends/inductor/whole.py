"""A graph without a loop of ours, as torch's inductor backend compiles it.

Private torch API, tried on 2.11 and 2.13: ``compile_fx`` (what the inductor backend calls),
``torch._functorch.config.donated_buffer`` (whether a backward may write into what the forward saved for it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def compile_whole(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Forward and backward of a graph, compiled. The backward writes into nothing that was saved for it.

    Torch 2.13 takes a saved view of an input for memory of its own where it was added to zeros (what a rewrite leaves
    of the sum says that it is new), and its backward writes into the user's input.
    """
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(donated_buffer=False):
        compiled: Any = compile_fx(graph, list(inputs))
    return compiled  # type: ignore[no-any-return]
