"""A training program as a plain list of instructions in the order in which they are played.

Everything that draws, counts or writes down a program reads it through ``spelled_out``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from reroll.program.program import Program, advance, backward, offload, recompute, reload, reverse, save, tape, turn
from reroll.program.writing import name_at

RUNS = ("advance", "recompute", "tape")
_KINDS: Mapping[Any, str] = {
    **{target: target.__name__ for target in (advance, recompute, tape, save, offload, reload, turn, backward)},
    operator.getitem: "pick",
}


@dataclass(frozen=True, slots=True)
class Played:
    """One instruction: ``kind`` is its name in ``reroll.program.program``, or "carry" (the first one), "pick",
    "output".

    ``reads`` are the numbers of the instructions whose values it takes, in its own order. Runs and backwards have the
    steps [start, stop); a pick the ``item`` of its block; an offload its ``tier``; saves and offloads a ``codec``.
    """

    name: str
    kind: str
    reads: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0
    item: int = 0
    tier: str = ""
    codec: tuple[str, ...] = ()


def spelled_out(program: Program) -> Iterator[Played]:
    """The instructions of a legal program in the order in which they are played, numbered from zero; those of a part
    each time that it is played."""
    yield from _Spelled(program).walk(program.graph, 0, {})


@dataclass(slots=True)
class _Spelled:
    """Spells out a program; ``count`` instructions were named so far."""

    program: Program
    count: int = 0

    def walk(self, graph: fx.Graph, origin: int, numbers: dict[Any, int]) -> Iterator[Played]:
        """The instructions of a graph whose steps start at ``origin``; ``numbers`` of what it was given."""
        for node in graph.nodes:
            args: Any = node.args
            if node in numbers or (node.op == "output" and graph is not self.program.graph):
                continue
            if node.target is reverse:
                part = self.program.parts[args[2]].graph
                inner = dict(zip(part.find_nodes(op="placeholder"), (numbers[each] for each in args[:2]), strict=True))
                yield from self.walk(part, origin + args[3], inner)
                numbers[node] = inner[part.output_node().args[0]]
                continue
            numbers[node] = self.count
            self.count += 1
            yield _played(node, numbers, origin)


def _played(node: fx.Node, numbers: Mapping[Any, int], origin: int) -> Played:
    args: Any = node.args
    kind = {"placeholder": "carry", "output": "output"}.get(node.op) or _KINDS[node.target]
    start, stop = 0, 0
    if kind in RUNS:
        start, stop = (origin + step for step in args[1:])
    elif kind == "backward":
        start, stop = (origin + step for step in args[0].args[1:])
    sources: Any = () if kind == "carry" else args[0] if kind == "offload" else args[: 2 if kind == "backward" else 1]
    return Played(
        name=name_at(node, origin),
        kind=kind,
        reads=tuple(numbers[source] for source in sources),
        start=start,
        stop=stop,
        item=args[1] if kind == "pick" else 0,
        tier=args[1] if kind == "offload" else "",
        codec=tuple(cast(Any, node.kwargs.get("codec", ()))),
    )
