"""What a record of a model says, in a few numbers, to be compared with that of a later run of the same call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from typing import Any

from torch import fx

from reroll.capture.folded import is_row, run_ended, skipped_runs
from reroll.capture.recorder.graph import NOTED
from reroll.capture.recorder.repeats import look_of
from reroll.graph.lines import where
from reroll.graph.nested import tensors_of
from reroll.graph.private import map_aggregate

_Runs = tuple[int, int]
"""How many runs are missing, and of how many operations each is."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A graph that was recorded, in ``numbers`` that are equal for nodes that do the same.

    To find the line where two differ, ``kinds`` are those of operations alone, equal also where whole numbers in them
    differ, each with its node's place; ``missing``: how many runs are, behind so many operations.
    """

    numbers: tuple[int, ...]
    kinds: tuple[tuple[int, int], ...]
    missing: dict[int, _Runs]

    @classmethod
    def of(cls, graph: fx.Graph) -> Digest:
        """That of a graph."""
        places, missing, open_ = dict[fx.Node, int](), dict[int, _Runs](), (0, 0)
        for node in graph.nodes:
            if node.target is skipped_runs:
                open_ = len(places), node.args[0]
            elif node.target is run_ended:
                missing[open_[0]] = open_[1], len(places) - open_[0]
            elif not is_row(node):
                places[node] = len(places)
        every = [_numbers(node, places) for node in graph.nodes]
        kinds = (
            (each[1], place)
            for place, (node, each) in enumerate(zip(graph.nodes, every, strict=True))
            if node in places
        )
        return cls(tuple(number for number, _ in every), tuple(kinds), missing)

    def departure(self, again: Digest, graph: fx.Graph) -> str:
        """Where another record, of a ``graph``, does something else; empty where it does not."""
        if self == again:
            return ""
        pairs = zip_longest(self._all(), again._all(), fillvalue=(0, -1))
        place = next((there for (one, _), (other, there) in pairs if one != other), None)
        if place is None:
            numbers = zip_longest(self.numbers, again.numbers)
            place = min(next(at for at, pair in enumerate(numbers) if pair[0] != pair[1]), len(graph.nodes) - 1)
        return f"It does something else at {where(list(graph.nodes)[place])}."

    def _all(self) -> Iterator[tuple[int, int]]:
        """The kinds of all runs, with the places of nodes for them."""
        for at, kind in enumerate(self.kinds):
            runs, size = self.missing.get(at, (0, 0))
            yield from chain.from_iterable(repeat(self.kinds[at - size : at], runs))
            yield kind


def _numbers(node: fx.Node, places: dict[fx.Node, int]) -> tuple[int, int]:
    """The number of a node and that of its kind: what it does, to values that were made how many operations before, and
    what comes of it; in that of its kind without whole numbers."""
    here, whole = places.get(node, 0), list[int]()

    def said(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            whole.extend([value] if type(value) is int else [])
            return "a whole number" if type(value) is int else value
        if is_row(value):
            return "row of", *map(said, value.args)
        return f"input {places[value]}" if value.op == "placeholder" else f"made {here - places.get(value, 0)}"

    given: tuple[Any, ...] = ()
    if node.op != "placeholder":
        given = node.target, repr(map_aggregate((node.args, dict(node.kwargs)), said)), *node.meta.get(NOTED, ())
    looks = tuple(map(look_of, tensors_of(node.meta.get("example_value"))))
    kind = hash((node.op, given, looks))
    return hash((kind, *whole)), kind
