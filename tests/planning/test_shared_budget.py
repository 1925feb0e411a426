"""Budgets that several recurrences share, against all choices of one offer for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from reroll.planning.shared_budget import Offer, cheapest, least

OFFER = st.builds(lambda kept, more, cost: Offer(kept + more, kept, cost), *[st.integers(0, 60)] * 3)
OFFERS = st.lists(
    st.lists(OFFER, min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def needed(chosen: Sequence[Offer]) -> int:
    """The peak of a step: what each holds with what those before it keep."""
    return max(each.peak + sum(o.kept for o in chosen[:at]) for at, each in enumerate(chosen))


def all_choices(offers: Sequence[Sequence[Offer]], budget: int) -> Iterator[Sequence[Offer]]:
    return (chosen for chosen in product(*offers) if needed(chosen) <= budget)


@given(OFFERS, st.integers(0, 200))
def test_the_cheapest_that_fit_are_those_of_all_choices(offers: list[list[Offer]], budget: int) -> None:
    costs = [sum(each.cost for each in chosen) for chosen in all_choices(offers, budget)]
    found = cheapest(offers, budget)
    if found is None:
        assert not costs
        return
    chosen = [mine[number] for mine, number in zip(offers, found, strict=True)]
    assert needed(chosen) <= budget
    assert sum(each.cost for each in chosen) == min(costs)


@given(OFFERS)
def test_that_much_works_and_one_byte_less_does_not(offers: list[list[Offer]]) -> None:
    found = least(offers)
    assert found == min(needed(chosen) for chosen in product(*offers))
    assert cheapest(offers, found) is not None
    assert cheapest(offers, found - 1) is None


def test_bytes_go_where_they_are_worth_most() -> None:
    """The first saves 10 runs with 40 bytes more, the second 90 with as many; there is room for one of them."""
    first = [Offer(20, 10, 100), Offer(60, 50, 90)]
    second = [Offer(20, 10, 300), Offer(60, 50, 210)]
    assert cheapest([first, second], 70) == (0, 1)
    assert cheapest([first, second], 110) == (1, 1)
    assert cheapest([first, second], 69) == (0, 0)
    assert cheapest([first, second], 29) is None


def test_many_recurrences_keep_the_choice_that_keeps_least() -> None:
    offers = [[Offer(k, k, 1000 / k + number / 7) for k in range(1, 40)] for number in range(40)]
    budget = least(offers)
    assert cheapest(offers, budget) == (0,) * 40
    assert cheapest(offers, 4 * budget) is not None
