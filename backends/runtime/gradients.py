"""Gradients of operands, added up segment by segment while the backward half is played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reroll.backends.inductor.lower import Segment
from reroll.recurrence import Items, Recurrence, Slices
from reroll.segment.factors import Product, Taker
from reroll.segment.trace import time_slice


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the results of a segment's backward go, by their numbers.

    ``carries``: for each carry the number of its gradient, or None. ``slices`` and ``items``: (number, per-step input),
    of a list of items its offset from the segment's first step too. ``constants``: (number, operand). ``products``:
    (operand, product), gradients that are given by their factors. ``reached``: for each carry the outputs from which
    autograd reaches it, ``sources``: the same of each input, by the operands that are read there at any step. ``lone``:
    operands that one step alone reads, from a list, as blocks read their weights. ``places``: all by their numbers.
    """

    carries: tuple[int | None, ...]
    slices: tuple[tuple[int, Slices], ...]
    items: tuple[tuple[int, Items, int], ...]
    constants: tuple[tuple[int, int], ...]
    products: tuple[tuple[int, Product], ...]
    reached: tuple[frozenset[int], ...]
    sources: Mapping[tuple[int, ...], frozenset[int]]
    lone: frozenset[int]
    places: Mapping[int, Slices | tuple[Items, int] | int] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, recurrence: Recurrence) -> Routes:
        """Those of a segment of a recurrence."""
        slots = recurrence.slots(segment.steps)
        given = {place: number for number, place in enumerate(segment.inputs) if number not in segment.products}
        xs = [(given[at], x, offset) for places, x in slots.xs for offset, at in enumerate(places) if at in given]
        ends = dict(zip(segment.inputs, segment.reaches, strict=True))
        sources = dict[tuple[int, ...], frozenset[int]]()
        for place, outputs in ends.items():
            sources[slots.operands[place]] = sources.get(slots.operands[place], frozenset()) | outputs
        slices = tuple((number, x) for number, x, _ in xs if isinstance(x, Slices))
        items = tuple((number, x, offset) for number, x, offset in xs if isinstance(x, Items))
        constants = tuple((given[place], slots.operands[place][0]) for place in slots.constants if place in given)
        return cls(
            carries=tuple(given.get(place) for place in slots.carries),
            slices=slices,
            items=items,
            constants=constants,
            products=tuple((slots.operands[segment.inputs[n]][0], each) for n, each in segment.products.items()),
            reached=tuple(ends.get(place, frozenset()) for place in slots.carries),
            sources=sources,
            lone=frozenset(operand for operand, times in _reads(recurrence).items() if times == 1),
            places={**dict(slices), **{number: (x, offset) for number, x, offset in items}, **dict(constants)},
        )

    def reach(self, outputs: Collection[int]) -> tuple[set[int], set[int]]:
        """The carries before a segment that gradients of some of its outputs reach, and what they reach of the operands
        that it reads."""
        carries = {carry for carry, ends in enumerate(self.reached) if not ends.isdisjoint(outputs)}
        found = {each for operands, ends in self.sources.items() if not ends.isdisjoint(outputs) for each in operands}
        return carries, found.difference(range(len(self.carries)))


def _reads(recurrence: Recurrence) -> Counter[int]:
    """How often the operands in lists of a recurrence are read."""
    return Counter(operand for x in recurrence.xs if isinstance(x, Items) for operand in x.operands)


class Gradients:
    """The gradients of one backward so far. An operand that no segment reaches has none.

    What is a product by events in some segment is laid out for that from the first on.
    """

    def __init__(self, operands: Sequence[Tensor], routes: Mapping[int, Routes]) -> None:
        self._operands = operands
        self._routes = routes
        self._sums: dict[int, Tensor] = {}

    def pop(self, operand: int) -> Tensor | None:
        """The gradient of an operand, which is forgotten."""
        return self._sums.pop(operand, None)

    def taking(self, start: int, steps: int) -> Taker:
        """What takes gradients from the backward of steps [start, start + steps) while it runs."""
        return _Taking(self, self._routes[steps], start, steps)

    def collect(self, results: Sequence[Any], start: int, steps: int) -> list[Tensor | None]:
        """Add the results of the backward of steps [start, start + steps), but for what was taken before; gives the
        gradients of its carries."""
        routes, taking = self._routes[steps], self.taking(start, steps)
        listed = *(each[0] for each in routes.slices), *(each[0] for each in routes.items)
        for number in (*listed, *(each[0] for each in routes.constants)):
            if results[number] is not None:
                taking.take(number, results[number], own=False)
        for number, (_, product) in enumerate(routes.products):
            if results[product.left] is not None:
                taking.multiply(number, results[product.left], results[product.right])
        return [None if number is None else results[number] for number in routes.carries]

    def add_rows(self, grad: Tensor, x: Slices, start: int, steps: int) -> None:
        """Add the gradient of the rows of some steps."""
        time_slice(self._zeros(x.operand), x, start, steps).add_(grad)

    def add_product(self, operand: int, product: Product, left: Tensor, right: Tensor) -> None:
        """Add a gradient that is given by its factors."""
        product.add_to(self._zeros(operand), left, right)

    def add(self, operand: int, grad: Tensor, *, own: bool, lone: bool = False) -> None:
        """Add a gradient. The first is laid out as those that follow, so that adding them is fast; a ``lone`` one as
        its operand, as autograd would copy it otherwise, when all of the loop's are there. It becomes the sum where it
        is its ``own`` memory."""
        like = self._operands[operand]
        if operand in self._sums:
            self._sums[operand].add_(grad)
        elif lone and grad.stride() != like.stride():
            self._sums[operand] = torch.empty_like(like, dtype=grad.dtype).copy_(grad)
        else:
            self._sums[operand] = grad if own else grad.clone()

    def _zeros(self, operand: int) -> Tensor:
        if operand not in self._sums:
            products = [each for routes in self._routes.values() for of, each in routes.products if of == operand]
            first = next((product for product in products if product.events), products[0] if products else None)
            like = self._operands[operand]
            self._sums[operand] = first.zeros(like) if first else torch.zeros_like(like)
        return self._sums[operand]


class _Taking(NamedTuple):
    """Takes gradients, by their numbers in the backward of some steps."""

    gradients: Gradients
    routes: Routes
    start: int
    steps: int

    def take(self, number: int, grad: Tensor, own: bool) -> None:
        """Add it to what it is a gradient of."""
        place, gradients = self.routes.places.get(number), self.gradients
        if isinstance(place, Slices):
            gradients.add_rows(grad, place, self.start, self.steps)
        elif isinstance(place, int):
            gradients.add(place, grad, own=own)
        elif place is not None:
            items, offset = place
            operand = items.operands[self.start + offset]
            gradients.add(operand, grad, own=own, lone=operand in self.routes.lone)

    def multiply(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add the product of these factors."""
        operand, product = self.routes.products[number]
        self.gradients.add_product(operand, product, left, right)
