"""What a model returns at the full length, from what Dynamo's bytecode returned for a few steps.

Values of single steps that the model returns stand there as ``Row``: row k of run j. The model's own run at the full
length says which lists grow, and all numbers; a list that grows has a stretch of items whose rows follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import FunctionType
from typing import Any

from torch import Tensor

from reroll.backends.front.entries import Row, Running
from reroll.capture.recorder.identity import PLAIN
from reroll.errors import LengthError
from reroll.graph.nested import leaves_of, like, opened, structure_of, with_leaves

_STRETCH = 3
_PLAIN = (*PLAIN, slice, range, Enum, FunctionType)
Path = tuple[Any, ...]


def outputs(returned: Any, running: Running) -> Any:
    """The model's result. Raises LengthError where it has a structure that cannot be followed."""
    assert running.observed is not None
    return _Outputs(running).follow(returned, running.observed.skeleton, (), "")


class _Outputs:
    """Follows what Dynamo returned beside the skeleton of what the model returned."""

    def __init__(self, running: Running) -> None:
        assert running.observed is not None
        self.running, self.anchors = running, running.observed.pattern.anchors

    def follow(self, value: Any, seen: Any, path: Path, anchor: str) -> Any:
        """One part of the result. anchor: whether rows count from the ``first`` or the ``last``, if that is known."""
        if isinstance(value, Row):
            return self._row(value, anchor or self.anchors.get(path, ""))
        if isinstance(value, Tensor):
            return self.running.sequences.get(id(value), value)
        fields, shown = opened(value), opened(seen)
        if isinstance(fields, Mapping) and isinstance(shown, Mapping) and list(fields) == list(shown):
            found = {key: self.follow(fields[key], shown[key], (*path, key), anchor) for key in fields}
            return value if _same(found.values(), fields.values()) else like(value, found)
        if isinstance(value, list | tuple) and isinstance(seen, list | tuple):
            if len(value) != len(seen):
                return like(value, self._grown(value, seen, path))
            items = [self.follow(v, s, (*path, i), anchor) for i, (v, s) in enumerate(zip(value, seen, strict=True))]
            return value if _same(items, value) else like(value, items)
        if type(seen) is not type(value) or not isinstance(value, _PLAIN):
            raise self._refusal(path)
        return seen

    def _row(self, row: Row, anchor: str) -> Any:
        run, steps = self.running.runs[row.run], row.count
        if anchor == "first" or len(run) == steps:
            return run[row.index]
        if anchor == "last":
            return run[row.index - steps]
        raise self._refusal(())

    def _grown(self, value: Sequence[Any], seen: Sequence[Any], path: Path) -> list[Any]:
        """A list at the full length: a few first items, the stretch, a few last items."""
        start, stop = max(_stretches(value), key=lambda each: each[1] - each[0], default=(0, 0))
        count = len(seen) - start - (len(value) - stop)
        if stop - start < _STRETCH or count < 0:
            raise self._refusal(path)
        head = [self.follow(v, s, path, "first") for v, s in zip(value[:start], seen[:start], strict=True)]
        rest = len(value) - stop
        tail = [self.follow(v, s, path, "last") for v, s in zip(value[stop:], seen[len(seen) - rest :], strict=True)]
        middle = [self._shifted(value, start, stop, at, count, path) for at in range(count)]
        return [*head, *(self.follow(v, s, path, "first") for v, s in zip(middle, seen[start:], strict=False)), *tail]

    def _shifted(self, value: Sequence[Any], start: int, stop: int, at: int, count: int, path: Path) -> Any:
        """Item ``at`` of the stretch at the full length: the first one, with its rows moved on."""
        ends = dict(zip(_rows(value[start]), _rows(value[stop - 1]), strict=True))

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Row):
                return leaf
            grown, back = len(self.running.runs[leaf.run]) - leaf.count, ends[leaf].index < leaf.index
            first = leaf.index + (grown if back else 0)
            last = ends[leaf].index + (0 if back else grown)
            if abs(last - first) + 1 != count:
                raise self._refusal(path)
            return replace(leaf, index=first - at if back else first + at)

        return with_leaves(move, value[start])

    def _refusal(self, path: Path) -> LengthError:
        place = f" at {path}" if path else ""
        return LengthError(
            f"What the model returns{place} at {self.running.call.length} steps does not follow from short traces. "
            "Return tensors, or lists of one value a step, or use torch.compile(backend='reroll')."
        )


def _rows(value: Any) -> list[Row]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Row)]


def _stretches(values: Sequence[Any]) -> list[tuple[int, int]]:
    """[start, stop) of the stretches of items with rows that follow each other, one further or one back."""
    found, start = [], 0
    for at in range(1, len(values) + 1):
        if at == len(values) or not _follows(values[start:at], values[at]):
            found.append((start, at))
            start = at
    return [each for each in found if _rows(values[each[0]])]


def _follows(stretch: Sequence[Any], item: Any) -> bool:
    before, rows = _rows(stretch[-1]), _rows(item)
    if not rows or _shape(stretch[-1]) != _shape(item):
        return False
    steps = {b.index - a.index for a, b in zip(before, rows, strict=True)}
    first = (
        {b.index - a.index for a, b in zip(_rows(stretch[0]), _rows(stretch[1]), strict=True)} if stretch[1:] else steps
    )
    return steps == first and steps in ({1}, {-1})


def _shape(value: Any) -> Any:
    """The structure of an item, and the runs of its rows."""
    runs = [leaf.run if isinstance(leaf, Row) else isinstance(leaf, Tensor) and id(leaf) for leaf in leaves_of(value)]
    return structure_of(value), runs


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
