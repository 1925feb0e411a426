"""A training program as a plain list of instructions in the order in which they are played.

Everything that draws, counts or writes down a program reads it through ``spelled_out``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reroll.program import Program, advance, backward, offload, recompute, reload, save, tape, turn

RUNS = ("advance", "recompute", "tape")
_KINDS: Mapping[Any, str] = {
    **{target: target.__name__ for target in (advance, recompute, tape, save, offload, reload, turn, backward)},
    operator.getitem: "pick",
}


@dataclass(frozen=True, slots=True)
class Played:
    """One instruction: ``kind`` is its name in ``reroll.program``, or "carry" (the first one), "pick", "output".

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
    """The instructions of a legal program in the order in which they are played, numbered from zero."""
    numbers: dict[Any, int] = {}
    for number, node in enumerate(program.graph.nodes):
        args: Any = node.args
        kind = {"placeholder": "carry", "output": "output"}.get(node.op) or _KINDS[node.target]
        numbers[node] = number
        start, stop = 0, 0
        if kind in RUNS:
            start, stop = args[1:]
        elif kind == "backward":
            start, stop = args[0].args[1:]
        sources = () if kind == "carry" else args[0] if kind == "offload" else args[: 2 if kind == "backward" else 1]
        yield Played(
            name=node.name,
            kind=kind,
            reads=tuple(numbers[source] for source in sources),
            start=start,
            stop=stop,
            item=args[1] if kind == "pick" else 0,
            tier=args[1] if kind == "offload" else "",
            codec=tuple(node.kwargs.get("codec", ())),
        )
