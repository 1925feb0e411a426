"""A record that is folded while it is made: what repeats is stored once.

A record is a list of items, each a key and numbers. Three equal runs of a few items, whose numbers grow evenly from run
to run, open a loop. From then on what the loop predicts is counted and dropped, and what it does not predict closes it.
Loops hold loops. Numbers that are ``free``, such as a user's own, need not grow evenly: a loop keeps a table of those
that do not.

Nothing is lost: ``unfold`` gives the record, item by item, numbers included. A folded record is as large for any number
of runs, but for tables.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

Number = int | float
FEWEST_RUNS = 3
LONGEST_RUN = 600
"""Items of a run at most: so many are looked back at for an item that no loop predicts."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is done, ``key``, with its ``numbers``; ``free``: which of these need not grow evenly.

    A loop has a ``body``, of whose numbers those of the items do not matter: ``numbers`` of the loop are for each of
    theirs the first one and by how much it grows, or, where it is ``tabled``, that of each of the ``runs``.
    """

    key: Hashable
    numbers: tuple[Number, ...] = ()
    free: tuple[bool, ...] = ()
    body: tuple[Item, ...] = ()
    runs: int = 1
    tabled: tuple[bool, ...] = ()

    @property
    def size(self) -> int:
        """How many items and numbers are stored."""
        return 1 + len(self.numbers) + sum(1 if not each.body else each.size - len(each.numbers) for each in self.body)

    def run(self, number: int) -> Iterator[Item]:
        """The items of a run of a loop."""
        values, at = list[Number](), 0
        for tabled in self.tabled:
            width = self.runs if tabled else 2
            column = self.numbers[at : at + width]
            values.append(column[number] if tabled else _grown(column[0], column[1], number))
            at += width
        at = 0
        for each in self.body:
            yield replace(each, numbers=tuple(values[at : at + len(each.numbers)]))
            at += len(each.numbers)


def unfold(items: Sequence[Item] | Iterator[Item]) -> Iterator[Item]:
    """The items of a record, none of which is a loop."""
    for item in items:
        if item.body:
            for number in range(item.runs):
                yield from unfold(item.run(number))
        else:
            yield item


class Fold:
    """A record that grows: ``see`` each item of it, then ask for what is folded once (``done``)."""

    def __init__(self) -> None:
        self._closed, self._open = list[Item](), list[_Open]()
        self._keys = dict[Hashable, Hashable]()

    def see(self, key: Hashable, numbers: tuple[Number, ...] = (), free: tuple[bool, ...] = ()) -> None:
        """The next item. ``free`` is the same for all items of a key; none is where nothing is said."""
        self._push(Item(self._keys.setdefault(key, key), numbers, free or (False,) * len(numbers)))

    def done(self) -> tuple[Item, ...]:
        """The folded record, once all has been seen."""
        while self._open:
            self._push(*self._close())
        return tuple(self._closed)

    @property
    def size(self) -> int:
        """How many items and numbers are held."""
        return sum(each.size for each in self._closed) + sum(each.size for each in self._open)

    def _push(self, *items: Item) -> None:
        coming = deque(items)
        while coming:
            if not self._open:
                self._append(coming.popleft())
            elif self._open[0].takes(coming[0]):
                coming.popleft()
            else:
                coming.extendleft(reversed(self._close()))

    def _close(self) -> list[Item]:
        """Close the open loop; gives what was seen of the run that it had begun."""
        loop, begun = self._open.pop().closed()
        self._append(loop)
        return begun

    def _append(self, item: Item) -> None:
        """Store an item, and open a loop if it is the end of some equal runs, the shortest that there are."""
        self._closed.append(item)
        found = self._closed
        for length in range(1, min(LONGEST_RUN, len(found) // FEWEST_RUNS) + 1):
            if _alike(found[-1], found[-1 - length]):
                runs = [found[len(found) - length * (n + 1) : len(found) - length * n] for n in (2, 1, 0)]
                columns = _columns(runs)
                if columns is not None:
                    del found[-FEWEST_RUNS * length :]
                    self._open.append(_Open(tuple(runs[0]), columns))
                    return


def _alike(one: Item, other: Item) -> bool:
    """Whether items are the same but for their numbers. Keys of a fold are one object where they are equal."""
    if one.body or other.body:
        shapes = ((len(each.body), each.runs, each.tabled) for each in (one, other))
        return len(set(shapes)) == 1 and all(map(_alike, one.body, other.body))
    return one.key is other.key and len(one.numbers) == len(other.numbers)


def _same(one: Number, other: Number) -> bool:
    """Whether numbers are the same one, as -0.0 and 0.0 are not, nor 1 and 1.0, and a NaN is."""
    if type(one) is not type(other):
        return False
    if one != other:
        return math.isnan(one) and math.isnan(other)
    return bool(one) or math.copysign(1, one) == math.copysign(1, other)


def _grown(first: Number, step: Number, runs: int) -> Number:
    return first + runs * step if step else first


@dataclass(slots=True)
class _Column:
    """A number of a loop from run to run: the first one and by how much it grows, or a table."""

    first: Number
    step: Number
    table: list[Number] | None = None

    @classmethod
    def of(cls, values: Sequence[Number], *, free: bool) -> _Column | None:
        """Of the numbers of the first runs; none if they do not grow evenly, and are not free."""
        first, second, *_ = values
        step = 0 if _same(first, second) else second - first
        if all(_same(_grown(first, step, number), value) for number, value in enumerate(values)):
            return cls(first, step)
        return cls(first, step, [*values]) if free else None

    def add(self, run: int, value: Number) -> None:
        """The number of one more run, which becomes a table where that is another one than it predicts."""
        if self.table is None and not _same(_grown(self.first, self.step, run), value):
            self.table = [_grown(self.first, self.step, number) for number in range(run)]
        if self.table is not None:
            self.table.append(value)


def _columns(runs: Sequence[Sequence[Item]]) -> list[_Column] | None:
    """The numbers of some runs, one behind the other; none if these are not equal. Those of loops are not free."""
    found = list[_Column]()
    for items in zip(*runs, strict=True):
        if not all(_alike(items[0], each) for each in items[1:]):
            return None
        for place, values in enumerate(zip(*(each.numbers for each in items), strict=True)):
            column = _Column.of(values, free=not items[0].body and items[0].free[place])
            if column is None:
                return None
            found.append(column)
    return found


class _Open:
    """A loop that goes on: complete ``runs``, and the items that are predicted of the next."""

    def __init__(self, body: tuple[Item, ...], columns: list[_Column]) -> None:
        self.body, self.columns, self.runs = body, columns, FEWEST_RUNS
        self.places = dict[int, int]()  # of items that stand in no inner loop, by their number in a run, the columns
        at = number = 0
        for each in body:
            if not each.body:
                self.places[number] = at
            at, number = at + len(each.numbers), number + _leaves(each)
        self._begin()

    @property
    def size(self) -> int:
        """How many items and numbers are held."""
        return self._loop().size + len(self.columns)

    def _begin(self) -> None:
        self.coming, self.seen, self.others = self._predicted(), 0, dict[int, tuple[Number, ...]]()
        self.next: Item | None = next(self.coming, None)

    def _predicted(self) -> Iterator[Item]:
        """The items of the next run."""
        at = 0
        for each in self.body:
            columns = self.columns[at : at + len(each.numbers)]
            yield from unfold([replace(each, numbers=tuple(_grown(x.first, x.step, self.runs) for x in columns))])
            at += len(each.numbers)

    def takes(self, item: Item) -> bool:
        """Whether an item is the one that is predicted, but for its free numbers where it stands in no inner loop."""
        expected = self.next
        assert expected is not None
        if item.body or not _alike(item, expected):
            return False
        if not all(map(_same, item.numbers, expected.numbers)):
            direct = self.seen in self.places
            pairs = zip(item.numbers, expected.numbers, item.free, strict=True)
            if not all((direct and free) or _same(one, other) for one, other, free in pairs):
                return False
            self.others[self.seen] = item.numbers
        self.seen += 1
        self.next = next(self.coming, None)
        if self.next is None:
            self._end_run()
        return True

    def _end_run(self) -> None:
        seen = {
            self.places[number] + place: value
            for number, numbers in self.others.items()
            for place, value in enumerate(numbers)
        }
        for at, column in enumerate(self.columns):
            column.add(self.runs, seen.get(at, _grown(column.first, column.step, self.runs)))
        self.runs += 1
        self._begin()

    def _loop(self) -> Item:
        numbers = list[Number]()
        for column in self.columns:
            numbers += [column.first, column.step] if column.table is None else column.table
        tabled = tuple(column.table is not None for column in self.columns)
        return Item(None, tuple(numbers), (False,) * len(numbers), self.body, self.runs, tabled)

    def closed(self) -> tuple[Item, list[Item]]:
        """The loop, and what was seen of the run that it had begun."""
        begun = [
            replace(item, numbers=self.others.get(number, item.numbers))
            for number, item in zip(range(self.seen), self._predicted(), strict=False)
        ]
        return self._loop(), begun


def _leaves(item: Item) -> int:
    """How many items of a record an item stands for."""
    return item.runs * sum(map(_leaves, item.body)) if item.body else 1
