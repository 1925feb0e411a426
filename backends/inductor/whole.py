"""A graph without a loop of ours, as torch's inductor backend compiles it; and what is said where inductor fails.

Private torch API, tried on 2.11 and 2.13: ``compile_fx`` (what the inductor backend calls),
``torch._functorch.config.donated_buffer`` (whether a backward may write into what the forward saved for it),
``InductorError`` (which it raises where it cannot compile what it was given) with ``inner_exception``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from reroll.backends.inductor.inductor_workarounds import mended
from reroll.errors import UnsupportedError

CACHED = "Set TORCHINDUCTOR_CACHE_DIR to a folder in which this user may write, on a disk that is not full."
"""What helps where inductor cannot write."""


@contextmanager
def refused_by_inductor(what: str) -> Iterator[None]:
    """Inside, that inductor cannot compile ``what`` is an UnsupportedError, which says so."""
    from torch._inductor.exc import InductorError

    try:
        yield
    except (InductorError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        why = "Most often it fails without reroll, too. lowering='eager' runs everything by torch's own kernels."
        if isinstance(getattr(error, "inner_exception", error), OSError):
            why = CACHED
        raise UnsupportedError(f"Torch's inductor cannot compile {what}: {reason}. {why}") from error


def compile_whole(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Forward and backward of a graph, compiled. The backward writes into nothing that was saved for it.

    Torch 2.13 takes a saved view of an input for memory of its own where it was added to zeros (what a rewrite leaves
    of the sum says that it is new), and its backward writes into the user's input.
    """
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(donated_buffer=False), mended():
        compiled: Any = compile_fx(graph, list(inputs))
    return compiled  # type: ignore[no-any-return]
