"""Gradients of operands, added up segment by segment while the backward half is played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reroll.backends.inductor.lower import Segment
from reroll.recurrence import Items, Recurrence, Slices
from reroll.segment.factors import Product
from reroll.segment.trace import time_slice


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the results of a segment's backward go, by their numbers.

    ``carries``: for each carry the number of its gradient, or None. ``slices`` and ``items``: (number, per-step input),
    of a list of items its offset from the segment's first step too. ``constants``: (number, operand). ``products``:
    (operand, product), gradients that are given by their factors.
    """

    carries: tuple[int | None, ...]
    slices: tuple[tuple[int, Slices], ...]
    items: tuple[tuple[int, Items, int], ...]
    constants: tuple[tuple[int, int], ...]
    products: tuple[tuple[int, Product], ...]

    @classmethod
    def of(cls, segment: Segment, recurrence: Recurrence) -> Routes:
        """Those of a segment of a recurrence."""
        number_of = {place: number for number, place in enumerate(segment.inputs)}
        given = {place: n for place, n in number_of.items() if n not in segment.products}
        slices, items, at = list[tuple[int, Slices]](), list[tuple[int, Items, int]](), len(recurrence.carries)
        for x in recurrence.xs:
            if isinstance(x, Slices):
                slices += [(given[at], x)] if at in given else []
            elif isinstance(x, Items):
                items += [(given[at + k], x, k) for k in range(segment.steps) if at + k in given]
            at += segment.steps if isinstance(x, Items) else 1
        constants = [(given[at + k], n) for k, n in enumerate(recurrence.constants) if at + k in given]
        products = [(recurrence.constants[segment.inputs[n] - at], each) for n, each in segment.products.items()]
        carries = tuple(given.get(place) for place in range(len(recurrence.carries)))
        return cls(carries, tuple(slices), tuple(items), tuple(constants), tuple(products))


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

    def collect(self, results: Sequence[Any], start: int, steps: int) -> list[Tensor | None]:
        """Add the results of the backward of steps [start, start + steps); gives the gradients of its carries."""
        routes = self._routes[steps]
        for number, x in routes.slices:
            if results[number] is not None:
                time_slice(self._zeros(x.operand), x, start, steps).add_(results[number])
        for number, items, offset in routes.items:
            self._add(items.operands[start + offset], results[number])
        for number, operand in routes.constants:
            self._add(operand, results[number])
        for operand, product in routes.products:
            product.add_to(self._zeros(operand), results)
        return [None if number is None else results[number] for number in routes.carries]

    def _zeros(self, operand: int) -> Tensor:
        if operand not in self._sums:
            products = [each for routes in self._routes.values() for of, each in routes.products if of == operand]
            by_events = [product for product in products if product.events]
            like = self._operands[operand]
            self._sums[operand] = by_events[0].zeros(like) if by_events else torch.zeros_like(like)
        return self._sums[operand]

    def _add(self, operand: int, grad: Tensor | None) -> None:
        if grad is not None and operand in self._sums:
            self._sums[operand].add_(grad)
        elif grad is not None:
            self._sums[operand] = grad.clone()  # laid out as the gradients that follow, so that adding them is fast
