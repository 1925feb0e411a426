"""Runs in lists: what is found is in the list, and nothing longer was missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reroll.capture.steps.runs import FEWEST_BLOCKS, Item, longest, slopes

BLOCKS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=4)


def written_out(block: list[tuple[str, int, int]], blocks: int) -> list[Item]:
    return [(key, (first + at * slope,)) for at in range(blocks) for key, first, slope in block]


@given(
    BLOCKS, st.integers(FEWEST_BLOCKS, 6), st.lists(st.tuples(st.sampled_from("ab"), st.integers(-3, 3)), max_size=5)
)
def test_a_run_is_found_and_is_what_the_list_has(
    block: list[tuple[str, int, int]], blocks: int, rest: list[tuple[str, int]]
) -> None:
    items = [*written_out(block, blocks), *((key, (number,)) for key, number in rest)]
    period, count = longest(items, 0)
    assert period * count > (blocks - 1) * len(block)
    grows = slopes(items, 0, period)
    assert items[: period * count] == [
        (key, (numbers[0] + at * slope[0],))
        for at in range(count)
        for (key, numbers), slope in zip(items[:period], grows, strict=True)
    ]


def test_items_that_do_not_grow_evenly_are_no_run() -> None:
    items: list[Item] = [("a", (number * number,)) for number in range(20)]
    assert longest(items, 0) == (1, 1)
