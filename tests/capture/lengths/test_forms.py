"""Numbers at three lengths, and the function of run r and length T that they are: ``a + b r + c T``, or none."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from reroll.capture.lengths.forms import Affine, find_forms
from reroll.errors import LengthError

LENGTHS = (10, 11, 13)
Number = Callable[[int, int], int | float]


AFFINE: tuple[tuple[tuple[object, ...], tuple[object, object] | None], ...] = (
    ((10, 11, 13), (0, 1)),
    ((7, 7, 7), (7, 0)),
    ((-5, -7, -11), (15, -2)),
    ((100, 121, 169), None),  # affine at two lengths, as all is, but not at three
    ((10, 11, 12), None),
    ((1.0, 1.0, 1.0), None),  # of numbers that count only
    ((True, True, True), None),
)


@pytest.mark.parametrize(("values", "expected"), AFFINE)
def test_an_affine_function_through_three_points(
    values: tuple[object, ...], expected: tuple[object, object] | None
) -> None:
    found = Affine.through(LENGTHS, values)
    assert (found and (found.a, found.b)) == expected
    assert expected is None or Affine.through(LENGTHS[:2], values[:2]) == found


def test_two_points_are_always_affine() -> None:
    assert Affine.through(LENGTHS[:2], (100, 121)) == Affine(-110, 21)


def test_a_function_that_is_whole_at_some_lengths_only() -> None:
    found = Affine.through((10, 12, 16), (5, 6, 8))
    assert found == Affine(0, Fraction(1, 2))
    assert found(40) == 20
    with pytest.raises(LengthError, match=r"At 41 steps a loop would be run 41/2 times\."):
        found(41)


def rows(*numbers: Number) -> list[list[tuple[int | float, ...]]]:
    """What T runs at each length read."""
    return [[tuple(number(r, n) for number in numbers) for r in range(n)] for n in LENGTHS]


def at_first(other: int) -> Number:
    return lambda r, n: other if r == 0 else r


FORMS: tuple[tuple[Number, tuple[int, int], tuple[int | float, int, int]], ...] = (
    (lambda r, n: 7, (0, 0), (7, 0, 0)),
    (lambda r, n: 0.5, (0, 0), (0.5, 0, 0)),
    (lambda r, n: r, (0, 0), (0, 1, 0)),
    (lambda r, n: n - 1 - r, (0, 0), (-1, -1, 1)),
    (lambda r, n: 3 + 2 * r - 5 * n, (0, 0), (3, 2, -5)),
    (at_first(9), (1, 0), (0, 1, 0)),  # the first run reads something else
    (lambda r, n: max(r, 2), (2, 0), (0, 1, 0)),
    (lambda r, n: min(r, n - 2), (0, 1), (0, 1, 0)),
    (lambda r, n: 40 if r == n - 1 else at_first(9)(r, n), (1, 1), (0, 1, 0)),
)


@pytest.mark.parametrize(("number", "own", "expected"), FORMS)
def test_the_form_of_a_number(number: Number, own: tuple[int, int], expected: tuple[int | float, int, int]) -> None:
    first, last, middle = find_forms(LENGTHS, rows(number), ("size",), (), "a line")
    assert (len(first), len(last)) == own
    assert (*middle.a, *middle.b, *middle.c) == expected
    assert not middle.free
    for n in (*LENGTHS, 20):
        for r in range(n):
            at_end = n - r <= len(last)
            form = first[r] if r < len(first) else last[n - r - 1] if at_end else middle
            assert form(r if form is middle else 0, n) == (number(r, n),)


NO_FORM: tuple[Number, ...] = (
    lambda r, n: r * r,
    lambda r, n: r % 2,
    lambda r, n: n * n,
    lambda r, n: n * r,
    lambda r, n: 0.9**r,
    lambda r, n: 1 / n,
    lambda r, n: max(r, 5),  # five first runs of their own are more than four
)


@pytest.mark.parametrize("number", NO_FORM)
def test_what_has_no_form(number: Number) -> None:
    message = re.escape("What a line reads or is given changes from step to step")
    with pytest.raises(LengthError, match=message):
        find_forms(LENGTHS, rows(number), ("size",), ("number",), "a line")


@pytest.mark.parametrize("number", NO_FORM)
def test_a_number_of_the_user_may_be_free(number: Number) -> None:
    first, last, middle = find_forms(LENGTHS, rows(lambda r, n: r, number), ("size", "number"), ("number",), "a line")
    assert (first, last) == ((), ())
    assert middle.free == {1}
    assert (middle.a[0], middle.b[0], middle.c[0]) == (0, 1, 0)


ONCE: tuple[tuple[list[list[tuple[int | float, ...]]], tuple[int, int, int] | None], ...] = (
    ([[(10,)], [(11,)], [(13,)]], (0, 0, 1)),
    ([[(4,)], [(4,)], [(4,)]], (4, 0, 0)),
    ([[(100,)], [(121,)], [(169,)]], None),
    ([[], [], []], None),
)


@pytest.mark.parametrize(("numbers", "expected"), ONCE)
def test_what_is_run_once(numbers: list[list[tuple[int | float, ...]]], expected: tuple[int, int, int] | None) -> None:
    if expected is None:
        with pytest.raises(LengthError):
            find_forms(LENGTHS, numbers, ("size",), (), "a line")
        return
    first, last, middle = find_forms(LENGTHS, numbers, ("size",), (), "a line")
    assert len(first) == 1
    assert last == ()
    assert first[0] == middle
    assert (*middle.a, *middle.b, *middle.c) == expected
