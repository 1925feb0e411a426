"""Online checkpoints: optimal for few segments, near it for more, and never more carries than slots."""

from math import comb

import pytest

from reroll.errors import OptionError
from reroll.schedules.optimal.online import Finished, Online
from reroll.schedules.optimal.problem import LocalSlots, gap
from reroll.schedules.optimal.revolve import least_extra
from reversals import played


def reversals(slots: int, most: int) -> list[Finished]:
    """What is reversed if there are 1, 2, ..., ``most`` segments."""
    online, found = Online(slots), [Online(slots).finish(1)]
    for steps in range(2, most + 1):
        if steps > 2:
            online, _ = online.offer(steps - 2)
        assert len(online.kept) <= slots
        found.append(online.finish(steps))
    return found


@pytest.mark.parametrize("slots", range(1, 21))
def test_optimal_up_to_two_extra_runs_of_each_segment(slots: int) -> None:
    """The range of algorithm I of Stumm and Walther (2010)."""
    assert all(gap(each) == 0 for each in reversals(slots, comb(slots + 2, 2)))


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 1.0), (2, 1.14), (3, 1.07), (4, 1.06), (5, 1.05), (9, 1.04), (12, 1.04), (20, 1.04)]
)
def test_near_the_optimum_beyond(slots: int, most: float) -> None:
    assert all(each.extra <= most * each.bound for each in reversals(slots, 2000))


def test_no_rule_is_always_within_1_12_times_the_optimum_in_two_slots() -> None:
    """All positions of the second carry that are within a ratio at every number of segments: none is left at 1.12."""

    def lasts(ratio: float, most: int = 300) -> bool:
        second, steps = {0}, 1
        while second and steps < most:
            steps += 1
            least = least_extra(steps, 2)
            second = {at for at in (*second, steps - 2) if cost(at, steps) <= ratio * least}
        return bool(second)

    def cost(second: int, steps: int) -> int:
        if second == 0:
            return steps - 1 + least_extra(steps - 1, 2)
        return steps - 1 + least_extra(second, 2) + least_extra(steps - 1 - second, 1)

    assert not lasts(1.12)
    assert lasts(1.14)


def test_schedules_play_at_their_cost() -> None:
    for slots in (1, 2, 3, 7):
        for each in reversals(slots, 90):
            assert played(each, LocalSlots(slots)) == each.extra
            assert each.bound == least_extra(each.root.length, slots)


def test_what_is_given_up_and_what_is_not_offered() -> None:
    online = Online(2)
    online, given_up = online.offer(1)
    assert (online.kept, given_up) == ((0, 1), None)
    online, given_up = online.offer(3)
    assert (online.kept, given_up) == ((0, 3), 1)
    assert played(online.finish(9), LocalSlots(2)) == online.finish(9).extra
    assert Online(1).offer(1) == (Online(1), 1)


def test_bad_offers_are_refused() -> None:
    online, _ = Online(3).offer(4)
    with pytest.raises(OptionError, match="Carry 4 was offered, but 4 is kept already"):
        online.offer(4)
    with pytest.raises(OptionError, match="There are 5 segments, but carry 4 is kept"):
        online.finish(5)
    with pytest.raises(OptionError, match="There are 1 segments"):
        online.finish(1)
    with pytest.raises(OptionError, match="steps=0"):
        Online(3).finish(0)
    with pytest.raises(OptionError, match="slots=0, but slots must be at least 1"):
        Online(0)
