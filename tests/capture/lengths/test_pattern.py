"""What a model does at three lengths, as stretches that are run once and loops whose number of runs follows T."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest

from reroll.capture.lengths.pattern import EventTrace, find_pattern
from reroll.errors import LengthError

LENGTHS = (8, 9, 11)
PALETTE = {("mul", None, "made", "float"): 0, ("tanh", None, "made"): 1, ("gives result", None, "made"): 2}
Event = tuple[int, tuple[int | float, ...]]


def trace(length: int, events: Sequence[Event]) -> EventTrace:
    """A recording of these events."""
    colours = [colour for colour, _ in events]
    return EventTrace(length, colours, [numbers for _, numbers in events], ["a line"] * len(events), {})


def behind(length: int, scales: tuple[float, ...]) -> EventTrace:
    """``for t in range(T): h = tanh(0.5 * h)``, and behind it products by these numbers."""
    steps: list[Event] = [(0, (1, 0, 0.5)), (1, (1, 0))]
    return trace(length, steps * length + [(0, (1, 0, each)) for each in scales] + [(2, (1, 0))])


@pytest.mark.parametrize("scales", [(), (0.3,), (0.3, 0.9, 0.5), (0.3,) * 5])
def test_equal_operations_in_a_row_that_do_not_grow_are_no_loop(scales: tuple[float, ...]) -> None:
    pattern = find_pattern([behind(length, scales) for length in LENGTHS], PALETTE)
    assert [stretch.count(20) for stretch in pattern.stretches if stretch.count.b] == [20]
    numbers = [each.values for each in pattern.literals if each.stretch]
    assert numbers == [((scale,),) * 3 for scale in scales]


def test_equal_operations_in_a_row_that_grow_are_one() -> None:
    traces = [trace(n, [(1, (1, 0))] + [(0, (1, 0, 0.5))] * (n - 1) + [(2, (1, 0))]) for n in LENGTHS]
    pattern = find_pattern(traces, PALETTE)
    assert [stretch.count(20) for stretch in pattern.stretches] == [1, 19, 1]


def test_a_loop_that_is_run_a_number_of_times_that_is_not_affine_is_refused() -> None:
    traces = [trace(n, [(0, (1, 0, 0.5))] * (n * n) + [(2, (1, 0))]) for n in LENGTHS]
    with pytest.raises(LengthError, match=r"which is no affine function of the length\. Use torch\.compile"):
        find_pattern(traces, PALETTE)


def test_a_loop_that_is_run_fewer_times_at_greater_lengths_is_refused() -> None:
    traces = [trace(n, [(1, (1, 0))] + [(0, (1, 0, 0.5))] * (16 - n) + [(2, (1, 0))]) for n in LENGTHS]
    with pytest.raises(LengthError, match="8, 7, 5 times at lengths 8, 9, 11, which is fewer times the longer"):
        find_pattern(traces, PALETTE)


def test_a_length_at_which_something_else_is_done_is_refused_with_a_way_out() -> None:
    traces = [trace(n, [(1, (1, 0)), *[(0, (1, 0, 0.5))] * n, (2, (1, 0))][n == LENGTHS[0] :]) for n in LENGTHS]
    with pytest.raises(LengthError, match=r"at 8 steps differs from other lengths, at .*\. Use torch\.compile"):
        find_pattern(traces, PALETTE)


def test_a_loop_that_begins_within_what_looks_like_one_more_run_of_another() -> None:
    """``for t in range(T)`` with one operation more in the first four steps: the steps end alike."""
    warm, plain = [(1, (1, 0)), (0, (1, 0, 0.5)), (1, (1, 0))], [(1, (1, 0)), (1, (1, 0))]
    traces = [trace(n, [(2, (1, 0)), *warm * 4, *plain * (n - 4), (2, (1, 0))]) for n in LENGTHS]
    counts = [stretch.count(20) * len(stretch.slots) for stretch in find_pattern(traces, PALETTE).stretches]
    assert sum(counts) == 2 + 3 * 4 + 2 * 16


def test_steps_of_a_run_are_those_of_the_loop_whose_operations_have_the_period() -> None:
    """Every second step has one operation more; the loop behind it reads a row at a distance that has that period."""
    lengths = (9, 11, 15)
    steps = [[(1, (1, 0))] + [(0, (1, 0, 0.5))] * (t % 2) for t in range(lengths[-1])]
    rows: list[Event] = [(3, (2 - t % 2, 0)) for t in range(lengths[-1])]
    palette = {**PALETTE, ("exp", None, "made"): 3}
    traces = [trace(n, [*chain(*steps[:n]), (2, (1, 0)), *rows[:n], (2, (1, 0))]) for n in lengths]
    with pytest.raises(LengthError, match="changes from step to step"):
        find_pattern(traces, palette)
    pattern = find_pattern(traces, palette, multiple=2)
    assert [(len(each.slots), each.count(21)) for each in pattern.stretches if each.count.b] == [(3, 10), (2, 10)]
