"""Where the gradients of a segment go, how they are added up, and which operands get none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from reroll.backends.inductor.lower import ExtraOperands, Segment
from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.gradients import Gradients, Routes
from reroll.recurrence import Items
from reroll.segment.factors import Product
from six_inputs import ITEMS, SEQUENCE, WEIGHT, operands, six_inputs

H, C, X, FIRST, SECOND, NUMBERS, W = range(7)
"""Places of the inputs of a segment of two steps: two carries, rows, two items of a list, numbers, a constant."""
ALL = (H, C, X, FIRST, SECOND, W)
LAST_H, LAST_C, Y = range(3)
"""Its outputs."""
ROWS, LIST, _ = six_inputs().xs


def segment(
    inputs: Sequence[int], reaches: Sequence[Sequence[int]] = (), products: Mapping[int, Product] | None = None
) -> Segment:
    """Two steps with gradients of some inputs, and the outputs that reach them; it has no kernels."""
    return Segment(
        steps=2,
        forward=list,
        backward=list,
        outputs=3,
        tangents=(LAST_H, LAST_C, Y),
        inputs=tuple(inputs),
        reaches=tuple(map(frozenset, reaches or ((Y,),) * len(inputs))),
        output_examples=(),
        forward_graph=fx.GraphModule({}, fx.Graph()),
        backward_graph=None,
        extra_forward=ExtraOperands(),
        extra_backward=ExtraOperands(),
        products=products or {},
    )


def routes(
    inputs: Sequence[int], reaches: Sequence[Sequence[int]] = (), products: Mapping[int, Product] | None = None
) -> Routes:
    return Routes.of(segment(inputs, reaches, products), six_inputs())


def test_every_kind_of_input_has_its_route() -> None:
    made = routes(ALL)
    assert made.carries == (0, 1)
    assert made.slices == ((2, ROWS),)
    assert made.items == ((3, LIST, 0), (4, LIST, 1))
    assert made.constants == ((5, WEIGHT),)
    assert made.products == ()
    assert list(made.sources) == [(0,), (1,), (SEQUENCE,), ITEMS, (WEIGHT,)]


@pytest.mark.parametrize(
    ("inputs", "carries", "slices", "items", "constants"),
    [
        ((), (None, None), (), (), ()),
        ((C,), (None, 0), (), (), ()),
        ((C, SECOND), (None, 0), (), ((1, LIST, 1),), ()),
        ((X, W), (None, None), ((0, ROWS),), (), ((1, WEIGHT),)),
    ],
)
def test_what_needs_no_gradient_has_no_route(
    inputs: Sequence[int], carries: object, slices: object, items: object, constants: object
) -> None:
    made = routes(inputs)
    assert (made.carries, made.slices, made.items, made.constants) == (carries, slices, items, constants)


def test_what_is_given_by_its_factors_has_no_other_route() -> None:
    product = Product(left=2, right=3)
    made = routes((X, W), products={1: product})
    assert (made.slices, made.constants, made.products) == (((0, ROWS),), (), ((WEIGHT, product),))
    assert alive_of(made, (Y,)) == {SEQUENCE, WEIGHT}


def added(made: Routes, *backwards: tuple[int, Sequence[Tensor | None]]) -> tuple[Gradients, list[list[Tensor | None]]]:
    """What was added up by (first step, results) of some backwards, and the gradients of carries that they gave."""
    found = Gradients(operands(), {2: made})
    return found, [found.collect(results, start, 2) for start, results in backwards]


def numbers(*values: float) -> list[Tensor]:
    """Gradients for all inputs, each of one number."""
    shapes = [(3,), (3,), (2, 3), (3,), (3,), (3,)]
    return [torch.full(shape, value) for shape, value in zip(shapes, values, strict=True)]


def test_gradients_are_added_up_over_the_segments() -> None:
    last, first = numbers(1, 2, 3, 4, 5, 6), numbers(10, 20, 30, 40, 50, 60)
    found, carries = added(routes(ALL), (2, last), (0, first))
    assert carries == [last[:2], first[:2]]
    sums = {operand: grad for operand in range(7) if (grad := found.pop(operand)) is not None}
    assert sums[SEQUENCE][:, 0].tolist() == [3, 3, 30, 30]  # it is read from its end on
    assert [sums[item].tolist() for item in sorted(set(ITEMS))] == [[40 + 5] * 3, [50] * 3, [4] * 3]  # 3 is read twice
    assert sums[WEIGHT].tolist() == [6 + 60] * 3
    assert len(sums) == 5


def test_what_a_segment_gives_is_not_written_to() -> None:
    last, first = numbers(1, 2, 3, 4, 5, 6), numbers(10, 20, 30, 40, 50, 60)
    added(routes(ALL), (2, last), (0, first))
    assert [float(value.flatten()[0]) for value in last] == [1, 2, 3, 4, 5, 6]


def test_an_operand_that_no_gradient_reaches_has_none() -> None:
    found, carries = added(routes(ALL), (2, [None] * 6), (0, [None] * 6))
    assert carries == [[None, None], [None, None]]
    assert [found.pop(operand) for operand in range(7)] == [None] * 7


def test_a_product_is_formed_where_it_is_added() -> None:
    left, right = torch.randn(3, 2), torch.randn(2, 4)
    values = [*operands()[:WEIGHT], torch.zeros(3, 4)]
    found = Gradients(values, {2: routes((W,), products={0: Product(left=1, right=2)})})
    for start in (2, 0):
        assert found.collect([None, left, right], start, 2) == [None, None]
    torch.testing.assert_close(found.pop(WEIGHT), 2 * left @ right)


def alive_of(made: Routes, given: Sequence[int]) -> Collection[int]:
    """The operands that gradients of some outputs reach through four segments of two steps."""
    recurrence = SimpleNamespace(carries=made.carries, steps=8)
    executable: Any = SimpleNamespace(_live={}, recurrence=recurrence, lengths=lambda *_: [2] * 4, routes={2: made})
    return Executable.live_operands(executable, frozenset(given))


REACHES = {H: (LAST_C,), C: (Y,), X: (LAST_H,), FIRST: (), SECOND: (LAST_C,), W: (Y,)}
"""The output reads the second carry alone, that one the first and an item, and that one the rows."""


@pytest.mark.parametrize(
    ("given", "alive"),
    [
        ((), set()),
        ((LAST_H,), {SEQUENCE}),
        ((LAST_C,), {SEQUENCE, *ITEMS}),  # the rows through the first carry, of the segment before
        ((Y,), {0, 1, SEQUENCE, *ITEMS, WEIGHT}),  # and that one through the second
        ((LAST_H, LAST_C), {SEQUENCE, *ITEMS}),
    ],
)
def test_the_operands_that_gradients_reach(given: Sequence[int], alive: set[int]) -> None:
    assert alive_of(routes(ALL, [REACHES[place] for place in ALL]), given) == alive


def test_numbers_are_no_operands() -> None:
    assert alive_of(routes((NUMBERS,)), (Y,)) == set()


def test_a_segment_without_gradients_reaches_nothing() -> None:
    assert alive_of(routes(()), (LAST_H, LAST_C, Y)) == set()


@pytest.mark.parametrize("places", [(0, 1), (0, 0)], ids=["once", "twice"])
def test_the_only_gradient_of_a_weight_lies_as_the_weight(places: tuple[int, int]) -> None:
    """Else autograd copies it, when those of all blocks are there. Where others follow, it lies as they do."""
    lone = frozenset(place for place in places if places.count(place) == 1)
    routes = Routes((), (), ((0, Items(places), 0),), (), (), (), {}, lone, {0: (Items(places), 0)})
    weights = [torch.randn(3, 4) for _ in range(2)]
    gradients, turned = Gradients(weights, {1: routes}), torch.randn(4, 3)
    gradients.collect([turned.t()], 0, 1)
    found = gradients.pop(0)
    assert found is not None
    assert torch.equal(found, turned.t())
    assert found.data_ptr() != turned.data_ptr()
    assert found.stride() == (weights[0] if places == (0, 1) else turned.t()).stride()
