"""Gradients of weights that are products are formed where they are added up: ``G += A B`` instead of ``G += (A B)``.

A backward then gives the factors, and the product adds onto the gradients so far, without a result of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.editing import aten, call
from reroll.segment.ops import OUTER, OUTER_ADD
from reroll.segment.products import turned

_NONE: tuple[list[fx.Node], Any, bool] = ([], None, False)


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that a backward gives by its factors: where they are among the results.

    It is ``left right``; with ``events`` (crossover, number) ``left^T right`` with many zeros in left. ``turned``: it
    is the transpose of that.
    """

    left: int
    right: int
    events: tuple[float, int] | None = None
    turned: bool = False

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros of the shape of a gradient, in the layout in which adding is fast: by rows for events."""
        if self.events is None:
            return torch.zeros_like(like)
        return like.new_zeros(like.shape[::-1]).t() if self.turned else like.new_zeros(like.shape)

    def add_to(self, total: Tensor, results: Sequence[Any]) -> None:
        """Add the product of a backward's results to the gradients so far."""
        left, right = results[self.left], results[self.right]
        total = total.t() if self.turned else total
        if self.events is None:
            total.addmm_(left, right)
        elif not (total.is_contiguous() and OUTER_ADD(total, left, right, *self.events)):
            total.addmm_(left.t(), right)


def defer_products(half: fx.GraphModule, constants: Sequence[bool]) -> Mapping[int, Product]:
    """Let a backward give the factors of its results that are products, instead of these. Gives these by number.

    constants: for each result, whether it is the gradient of a constant. The factors come after all results.
    """
    output = half.graph.output_node()
    given: Any = output.args[0]
    results, found = list(given), dict[int, Product]()
    for number, (result, constant) in enumerate(zip(given, constants, strict=True)):
        factors, events, is_turned = _factors(half.graph, result) if constant and results.count(result) == 1 else _NONE
        if factors:
            results[number] = None
            results += [factor for factor in factors if factor not in results[len(given) :]]
            left, right = (results.index(factor, len(given)) for factor in factors)
            found[number] = Product(left, right, events, is_turned)
    output.args = (tuple(results),)
    half.graph.eliminate_dead_code()
    half.recompile()
    return found


def _factors(graph: fx.Graph, result: Any) -> tuple[list[fx.Node], Any, bool]:
    """The factors of a product that nothing else reads, however often it is transposed; none of another result.

    And how a product of events is formed, and whether it is transposed then.
    """
    turns = 0
    while isinstance(result, fx.Node) and len(result.users) == 1 and (source := turned(result)) is not None:
        result, turns = source, turns + 1
    if not isinstance(result, fx.Node) or len(result.users) != 1:
        return _NONE
    factors: Any = result.args[:2]
    if result.target is OUTER:
        return list(factors), result.args[2:], turns % 2 == 1
    if result.target is not aten.mm.default:
        return _NONE
    if turns % 2 == 0:
        return list(factors), None, False
    with graph.inserting_before(graph.output_node()):
        return [_turned(graph, factor) for factor in reversed(factors)], None, False


def _turned(graph: fx.Graph, factor: fx.Node) -> fx.Node:
    return turned(factor) or call(graph, aten.permute.default, factor, [1, 0])
