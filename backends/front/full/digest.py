"""What a record of a model says, in a few numbers, to be compared with that of a later run of the same call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx

from reroll.capture.folded import run_ended, skipped_runs
from reroll.capture.recorder.graph import NOTED
from reroll.capture.recorder.repeats import look_of
from reroll.graph.lines import where
from reroll.graph.nested import tensors_of
from reroll.graph.private import map_aggregate

_Runs = tuple[int, int]
"""How many runs are missing, and of how many nodes each is."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A graph that was recorded: a number for each node, and how many runs are ``missing`` at a mark.

    The numbers are equal for operations that are the same, on operands that were made as many nodes before.
    """

    numbers: tuple[int, ...]
    missing: dict[int, _Runs]

    @classmethod
    def of(cls, graph: fx.Graph) -> Digest:
        """That of a graph."""
        nodes = list(graph.nodes)
        places = {node: place for place, node in enumerate(nodes)}
        ends = [place for place, node in enumerate(nodes) if node.target is run_ended]
        missing = dict[int, _Runs]()
        for place, node in enumerate(nodes):
            if node.target is skipped_runs:
                end = next(end for end in ends if end > place)
                missing[place] = node.args[0], end - place - 1
        return cls(tuple(_number(node, places) for node in nodes), missing)

    def departure(self, again: Digest, graph: fx.Graph) -> str:
        """Where another record, of a ``graph``, does something else; empty where it does not."""
        if self == again:
            return ""
        pairs = zip_longest(self._all(), again._all(), fillvalue=(0, -1))
        place = next((there for (one, _), (other, there) in pairs if one != other), None)
        if place is None:  # numbers that grow from run to run
            pairs = zip(self.numbers, again.numbers, strict=False)  # type: ignore[assignment]
            place = next(at for at, (one, other) in enumerate(pairs) if one != other)
        return f"It does something else at {where(list(graph.nodes)[place])}."

    def _all(self) -> Iterator[tuple[int, int]]:
        """The numbers of all runs, with the places of nodes for them; a number tells an operand of a run before from
        others by its distance alone."""
        for place, number in enumerate(self.numbers):
            if place not in self.missing:
                yield number, place
                continue
            runs, size = self.missing[place]
            run = [(self.numbers[at], at) for at in range(place - size, place)]
            for _ in range(runs):
                yield from run


def _number(node: fx.Node, places: dict[fx.Node, int]) -> int:
    """The number of a node: what it does, to which operands, and what comes of it."""
    here = places[node]

    def said(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        outside = value.op == "placeholder"
        return f"{'input' if outside else 'made'} {places[value] if outside else here - places[value]}"

    if node.op == "placeholder":
        given: tuple[Any, ...] = ()
    else:
        given = node.target, repr(map_aggregate((node.args, dict(node.kwargs)), said)), *node.meta.get(NOTED, ())
    looks = tuple(map(look_of, tensors_of(node.meta.get("example_value"))))
    return hash(
        (node.op, "" if node.op == "placeholder" else node.target, given, looks, tuple(node.meta.get(NOTED, ())))
    )
