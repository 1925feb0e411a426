"""Strides that are read off are those that inductor finds by simplifying, and a segment's code is the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import sympy
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from reroll.backends.inductor.wrapper_codegen.strides import quick

pytestmark = pytest.mark.inductor
D0, D1, SIZE = sympy.Symbol("d0", integer=True), sympy.Symbol("d1", integer=True), sympy.Symbol("s0", integer=True)
INDICES = [
    sympy.Integer(7),
    D0,
    D0 + 8192,
    256 * D0 + D1,
    256 * D0 + D1 + 32768,
    SIZE * D0 + D1,
    SIZE * D0 + 3 * D0 + 5,
    D0 * D1 + 4 * D1 + 1,
    FloorDiv(D1, 16) + 8 * D0 + 96,
    FloorDiv(D1, 3) + D1,
    64 * ModularIndexing(D1, 1, 32) + D0,
    ModularIndexing(D1, 2, 5) + 7 * D1 + 11,
    256 * D0 + FloorDiv(D1, 8) + 32 * ModularIndexing(D1, 1, 8) + 4096,
]


@pytest.mark.parametrize("length", [None, 8, 16])
@pytest.mark.parametrize("variable", [D0, D1])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_strides_are_those_of_inductor(index: Any, variable: sympy.Symbol, length: int | None) -> None:
    ask: Any = vars(cpp)["stride_at_vec_range"]
    expected, found = ask(index, variable, length), quick(ask)(index, variable, length)
    assert sympy.expand(found - expected) == 0
    assert (found == 0) == (expected == 0)
    assert (found == 1) == (expected == 1)


def test_nothing_is_asked_where_an_index_is_linear_and_once_for_all_steps_elsewhere() -> None:
    ask = mock.Mock(return_value=sympy.Integer(1))
    stride = quick(ask)
    for step in range(8):
        assert stride(256 * D0 + D1 + 8192 * step, D0, 16) == 256
    assert not ask.called
    for step in range(8):
        stride(FloorDiv(D1, 3) + 256 * D0 + 8192 * step, D1, 16)
    assert {call.args for call in ask.call_args_list} == {(FloorDiv(D1, 3), D1, 16)}


def test_conditions_are_left_to_inductor() -> None:
    ask = mock.Mock(return_value=sympy.S.Zero)
    assert quick(ask)(D0 > 3, D0, 8) == 0
    ask.assert_called_once_with(D0 > 3, D0, 8)
