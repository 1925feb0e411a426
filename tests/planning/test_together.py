"""Budgets that several recurrences share, against all choices of one offer for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from reroll.planning.together import Offer, cheapest, least

OFFER = st.builds(lambda kept, more, cost: Offer(kept + more, kept, cost), *[st.integers(0, 60)] * 3)
OFFERS = st.lists(
    st.lists(OFFER, min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def needed(chosen: Sequence[Offer], around: Sequence[int]) -> int:
    """The peak of a step: what each holds with what those before it keep."""
    return max(a + each.peak + sum(o.kept for o in chosen[:at]) for at, (a, each) in enumerate(zip(around, chosen)))  # noqa: B905


def all_choices(offers: Sequence[Sequence[Offer]], around: Sequence[int], budget: int) -> Iterator[Sequence[Offer]]:
    return (chosen for chosen in product(*offers) if needed(chosen, around) <= budget)


@given(OFFERS, st.lists(st.integers(0, 30), min_size=4, max_size=4), st.integers(0, 200))
def test_the_cheapest_that_fit_are_those_of_all_choices(
    offers: list[list[Offer]], around: list[int], budget: int
) -> None:
    around = around[: len(offers)]
    costs = [sum(each.cost for each in chosen) for chosen in all_choices(offers, around, budget)]
    found = cheapest(offers, around, budget)
    if found is None:
        assert not costs
        return
    chosen = [mine[number] for mine, number in zip(offers, found, strict=True)]
    assert needed(chosen, around) <= budget
    assert sum(each.cost for each in chosen) == min(costs)


@given(OFFERS, st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_that_much_works_and_one_byte_less_does_not(offers: list[list[Offer]], around: list[int]) -> None:
    around = around[: len(offers)]
    found = least(offers, around)
    assert found == min(needed(chosen, around) for chosen in product(*offers))
    assert cheapest(offers, around, found) is not None
    assert cheapest(offers, around, found - 1) is None


def test_bytes_go_where_they_are_worth_most() -> None:
    """The first saves 10 runs with 40 bytes more, the second 90 with as many; there is room for one of them."""
    first = [Offer(20, 10, 100), Offer(60, 50, 90)]
    second = [Offer(20, 10, 300), Offer(60, 50, 210)]
    assert cheapest([first, second], [0, 0], 70) == (0, 1)
    assert cheapest([first, second], [0, 0], 110) == (1, 1)
    assert cheapest([first, second], [0, 0], 69) == (0, 0)
    assert cheapest([first, second], [0, 0], 29) is None


def test_many_recurrences_keep_the_choice_that_keeps_least() -> None:
    offers = [[Offer(k, k, 1000 / k + number / 7) for k in range(1, 40)] for number in range(40)]
    budget = least(offers, [0] * 40)
    assert cheapest(offers, [0] * 40, budget) == (0,) * 40
    assert cheapest(offers, [0] * 40, 4 * budget) is not None
