"""Gradients of weights that are products are formed where they are added up: ``G += A B`` instead of ``G += (A B)``.

A backward then gives the factors, and the product adds onto the gradients so far, without a result of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from reroll.editing import aten, call
from reroll.stacking import turned

Factors = dict[int, tuple[int, int]]
"""For a result of a backward that is None: where its two factors are among the results."""


def defer_products(half: fx.GraphModule, constants: Sequence[bool]) -> Factors:
    """Let a backward give the factors of its results that are products, instead of these.

    constants: for each result, whether it is the gradient of a constant. The factors come after all results.
    """
    output = half.graph.output_node()
    given: Any = output.args[0]
    results, found = list(given), Factors()
    for number, (result, constant) in enumerate(zip(given, constants, strict=True)):
        factors = _factors(half.graph, result) if constant and results.count(result) == 1 else ()
        if factors:
            results[number] = None
            results += [factor for factor in factors if factor not in results[len(given) :]]
            left, right = (results.index(factor, len(given)) for factor in factors)
            found[number] = (left, right)
    output.args = (tuple(results),)
    half.graph.eliminate_dead_code()
    half.recompile()
    return found


def _factors(graph: fx.Graph, result: Any) -> list[fx.Node]:
    """The factors of a product that nothing else reads, however often it is transposed; none of another result."""
    turns = 0
    while isinstance(result, fx.Node) and len(result.users) == 1 and (source := turned(result)) is not None:
        result, turns = source, turns + 1
    if not isinstance(result, fx.Node) or len(result.users) != 1 or result.target is not aten.mm.default:
        return []
    factors: Any = result.args
    if turns % 2 == 0:
        return list(factors)
    with graph.inserting_before(graph.output_node()):
        return [_turned(graph, factor) for factor in reversed(factors)]


def _turned(graph: fx.Graph, factor: fx.Node) -> fx.Node:
    return turned(factor) or call(graph, aten.permute.default, factor, [1, 0])
