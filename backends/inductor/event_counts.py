"""Event products on a CPU: their kernels, and what is counted of the products of a recurrence.

Private torch API, tried on 2.11 and 2.13: ``CppCompileError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.inductor.sizes.family import is_looking
from reroll.backends.inductor.wrapper_codegen.machine import EVERY_MODEL, load
from reroll.backends.inductor.wrapper_codegen.unit import bound, quick_builds
from reroll.errors import warn
from reroll.segment.ops import OUTER, PACKED_EVENTS, PRODUCT, EventCount

_FOLDER = Path(__file__).parent / "native"
_INCLUDED = '#include "events.h"'


@cache
def built() -> bool:
    """Whether the kernels are there, once they are built. If that fails, a warning says so."""
    from torch._inductor.exc import CppCompileError

    try:
        building()()
    except (CppCompileError, OSError) as error:
        warn(
            f"Products of spikes run as torch's dense products: their kernels could not be built ({error}).",
        )
        return False
    return True


@cache
def building() -> Callable[[], Any]:
    """Begin to build the kernels, beside what else is compiled; the function that is given waits for them."""
    source, header = ((_FOLDER / name).read_text("utf-8") for name in ("event_kernels.cpp", "events.h"))
    worker = ThreadPoolExecutor(1)
    with quick_builds():  # built elsewhere, and again if the header changes: it is put in
        whole = EVERY_MODEL + "\n".join([source.replace(_INCLUDED, header), bound()])
        loaded = load(whole, worker.submit)
    worker.shutdown(wait=False)
    return loaded


class Watch:
    """The event products of a recurrence, and what was counted of them in its last call."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, int], int] = {}
        self._counts = torch.zeros(0, 4, dtype=torch.int64)
        self._by_torch = False  # whether torch calls some of them, by their names

    def add(self, half: fx.GraphModule, gradients_of: Sequence[str]) -> tuple[int, ...]:
        """Number the event products of a half; equal ones of other halves share a number.

        Those with packed weights get the row that they count in as an operand: the rows are given. gradients_of: for
        each result of a backward, the name of the constant whose gradient it is, or nothing; empty for a forward.
        """
        rows = dict[int, fx.Node]()
        nodes = [node for node in half.graph.nodes if node.target in (PRODUCT, OUTER, PACKED_EVENTS)]
        for node in nodes:
            number = self._numbers.setdefault(_key(node, gradients_of), len(self._numbers))
            if node.target is PACKED_EVENTS:
                rows[number] = rows.get(number) or _operand(half.graph, number, like=node)
                node.args = (*node.args[:2], rows[number], *node.args[3:])
            else:
                node.args = (*node.args[:-1], number)
        self._by_torch |= any(node.target is not PACKED_EVENTS for node in nodes)
        if nodes:
            half.recompile()
            self._counts = torch.zeros(len(self._numbers), 4, dtype=torch.int64)
        if self._by_torch and not is_looking():
            with suppress(RuntimeError, OSError):  # built() says why
                building()
        return tuple(rows)

    def rows(self, numbers: Sequence[int]) -> list[Tensor]:
        """What products count in, by the numbers that ``add`` gave."""
        return [self._counts[number] for number in numbers]

    @contextmanager
    def counting(self, *, afresh: bool) -> Iterator[None]:
        """Inside, event products of this thread are counted here, with those of others that run the same segments."""
        if not self._numbers:
            yield
            return
        if afresh:
            self._counts.zero_()
        if not self._by_torch:
            yield
            return
        built()
        counts = self._counts  # held for as long as the kernels write to it
        torch.ops.reroll.event_count(counts)
        try:
            yield
        finally:
            torch.ops.reroll.event_count(counts.new_empty(0))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, what is counted is not of a call."""
        counts = self._counts.clone()
        try:
            yield
        finally:
            self._counts.copy_(counts)

    @property
    def lines(self) -> tuple[EventCount, ...]:
        """What was seen of each product in the last call."""
        rows: list[list[int]] = self._counts.tolist()
        return tuple(EventCount(*key, *row) for key, row in zip(self._numbers, rows, strict=True))


def _key(node: fx.Node, gradients_of: Sequence[str]) -> tuple[str, str, int, int]:
    """What is said of a product: its kind, its weight, and its sizes (K, N)."""
    columns = node.meta["val"].shape[1]
    if node.target is OUTER:
        kind, name = "gradient" if gradients_of else "product", _gradient(node, gradients_of)
        left: Any = node.args[0]
    else:
        packed = node.target is PACKED_EVENTS
        left, weight = node.args[:2] if packed else node.args[1:3]
        kind, name = "product", _weight(weight)
    return kind, name, left.meta["val"].shape[1], columns


def _operand(graph: fx.Graph, number: int, like: fx.Node) -> fx.Node:
    """One more placeholder, for the counts of a product."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        operand = graph.placeholder(f"counts_{number}")
    operand.meta = {"val": like.meta["val"].new_empty(4, dtype=torch.int64)}
    return operand


def _weight(source: Any) -> str:
    """The constant that a product reads its weight from."""
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
