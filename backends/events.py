"""Event products on a CPU: their kernels, and what is counted of the products of a recurrence.

Private torch API, tried on 2.11 and 2.13: ``CppCodeCache`` (builds, loads and caches on disk).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from reroll.backends.toolchain import quick_builds
from reroll.errors import RerollWarning
from reroll.event_ops import OUTER, PRODUCT
from reroll.report import EventLine

_SOURCE = Path(__file__).with_name("event_kernels.cpp")


@cache
def built() -> bool:
    """Whether the kernels are there, once they are built. If that fails, a warning says so."""
    from torch._inductor.exc import CppCompileError

    try:
        building()()
    except (CppCompileError, OSError) as error:
        warnings.warn(
            f"Products of spikes run as torch's dense products: their kernels could not be built ({error}).",
            RerollWarning,
            stacklevel=2,
        )
        return False
    return True


@cache
def building() -> Callable[[], Any]:
    """Begin to build the kernels, beside what else is compiled; the function that is given waits for them."""
    from torch._inductor.codecache import CppCodeCache

    worker = ThreadPoolExecutor(1)
    with quick_builds():
        loaded: Callable[[], Any] = CppCodeCache.load_async(_SOURCE.read_text("utf-8"), submit_fn=worker.submit)
    worker.shutdown(wait=False)
    return loaded


class Watch:
    """The event products of a recurrence, and what was counted of them in its last call."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, int], int] = {}
        self._counts = torch.zeros(0, 4, dtype=torch.int64)

    def add(self, half: fx.GraphModule, gradients_of: Sequence[str]) -> None:
        """Number the event products of a half; equal ones of other halves share a number.

        gradients_of: for each result of a backward, the name of the constant whose gradient it is, or nothing; empty
        for a forward.
        """
        nodes = [node for node in half.graph.nodes if node.target in (PRODUCT, OUTER)]
        for node in nodes:
            k, n = node.args[-4].meta["val"].shape[1], node.meta["val"].shape[1]
            key = ("product", _weight(node), k, n)
            if node.target is OUTER:
                key = ("gradient" if gradients_of else "product", _gradient(node, gradients_of), k, n)
            node.args = (*node.args[:-1], self._numbers.setdefault(key, len(self._numbers)))
        if nodes:
            with suppress(RuntimeError, OSError):  # built() says why
                building()
            half.recompile()
            self._counts = torch.zeros(len(self._numbers), 4, dtype=torch.int64)

    @contextmanager
    def counting(self, *, afresh: bool) -> Iterator[None]:
        """Inside, event products of this thread are counted here."""
        if not self._numbers:
            yield
            return
        built()
        if afresh:
            self._counts.zero_()
        counts = self._counts  # held for as long as the kernels write to it
        torch.ops.reroll.event_count(counts)
        try:
            yield
        finally:
            torch.ops.reroll.event_count(counts.new_empty(0))

    @property
    def lines(self) -> tuple[EventLine, ...]:
        """What was seen of each product in the last call."""
        rows: list[list[int]] = self._counts.tolist()
        return tuple(EventLine(*key, *row) for key, row in zip(self._numbers, rows, strict=True))


def _weight(node: fx.Node) -> str:
    """The constant that a product reads its weight from."""
    source = node.args[-3]
    while isinstance(source, fx.Node) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return str(getattr(source, "meta", {}).get("constant", ""))


def _gradient(node: fx.Node, gradients_of: Sequence[str]) -> str:
    """The constant to whose gradient a node contributes."""
    while node.users and (user := next(iter(node.users))).op != "output":
        node = user
    results = node.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return next((name for name, result in zip(gradients_of, results, strict=False) if result is node), "")
