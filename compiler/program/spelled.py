"""The instructions of a training program as plain rows, numbered, instead of nodes of a graph.

``written`` gives those of one graph as they stand, with a ``reverse`` for each part that is played; ``spelled_out``
those of the whole program in the order in which they are played. What a program holds and how long it takes is told
from these rows (``reroll.program.tally``, ``memory``, ``timeline``); passes, the verifier and the runtime read nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import fx

from reroll.program.program import Program, backward, offload, reload, reverse, save, turn
from reroll.program.writing import RUNS, is_thin, name_at

RUN_KINDS = tuple(run.__name__ for run in RUNS)
_KINDS: Mapping[Any, str] = {
    **{target: target.__name__ for target in (*RUNS, save, offload, reload, turn, backward, reverse)},
    operator.getitem: "pick",
    "placeholder": "carry",
    "output": "output",
}


def kind_of(node: fx.Node) -> str:
    """The name of an instruction in ``reroll.program.program``, or "carry", "pick", "output"."""
    return _KINDS[node.target if node.op == "call_function" else node.op]


class Played(NamedTuple):
    """One instruction: ``kind`` is its name in ``reroll.program.program``, or "carry" (what the graph is given),
    "pick", "output".

    ``reads`` are the numbers of the instructions whose values it takes, in its own order. Runs and backwards have the
    steps [start, stop); a pick the ``item`` of its block; an offload its ``tier``; saves and offloads a ``codec``; a
    reverse its ``part``; tapes and their backwards whether they are ``thin``.
    """

    name: str
    kind: str
    reads: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0
    item: int = 0
    tier: str = ""
    codec: tuple[str, ...] = ()
    part: str = ""
    thin: bool = False


def written(graph: fx.Graph) -> tuple[Played, ...]:
    """The instructions of one graph, numbered from zero; steps are counted from its own first one."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return tuple([_played(node, numbers, 0) for node in numbers])


def spelled_out(program: Program) -> Iterator[Played]:
    """The instructions of a legal program in the order in which they are played, numbered from zero; those of a part
    each time that it is played, so that there is no ``reverse``."""
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
    name, kind = name_at(node, origin), kind_of(node)
    match kind:
        case "advance" | "recompute" | "tape":
            steps = origin + args[1], origin + args[2]
            return Played(name, kind, (numbers[args[0]],), *steps, thin=is_thin(node))
        case "backward":
            _, start, stop = args[0].args
            reads = numbers[args[0]], numbers[args[1]]
            return Played(name, kind, reads, origin + start, origin + stop, thin=is_thin(args[0]))
        case "reverse":
            return Played(name, kind, (numbers[args[0]], numbers[args[1]]), part=args[2])
        case "save":
            return Played(name, kind, (numbers[args[0]],), codec=_codec(node))
        case "offload":
            block = tuple([numbers[carry] for carry in args[0]])
            return Played(name, kind, block, tier=args[1], codec=_codec(node))
        case "pick":
            return Played(name, kind, (numbers[args[0]],), item=args[1])
        case "carry":
            return Played(name, kind)
    return Played(name, kind, (numbers[args[0]],))


def _codec(node: fx.Node) -> tuple[str, ...]:
    return tuple(cast(Any, node.kwargs.get("codec", ())))
