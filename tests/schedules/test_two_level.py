"""Several tiers: the exact optimum for two, tables and bounds for more, against searches through all schedules."""

import math
import random

import pytest

from oracle import ORACLE
from reroll.errors import OptionError
from reroll.schedules.optimal.best import optimum
from reroll.schedules.optimal.blend import blend
from reroll.schedules.optimal.problem import LocalSlots, OneTier, SlowTier, gap, stores
from reroll.schedules.optimal.revolve import least_extra
from reroll.schedules.optimal.tabled import tabled
from reroll.schedules.optimal.two_level import two_level
from reversals import LONG, least_cost, played, problems

COSTS = (0, 0.25, 0.5, 1, 2, 3.5, 7, 12)


def test_two_tiers_meet_the_oracle() -> None:
    for steps, fast, slow, forward, backward, write, read, cost in ORACLE["two_level_optimum"]["rows"]:
        schedule = optimum(steps, LocalSlots(fast), SlowTier(slow, write / forward, read / forward))
        assert schedule.extra * forward + schedule.root.length * backward == cost
        assert gap(schedule) == 0


def random_tiers(numbers: random.Random, count: int) -> list[SlowTier]:
    """Tiers in the order of their cost."""
    writes, reads = (sorted(numbers.choices(COSTS, k=count)) for _ in range(2))
    slots = (numbers.choice((1, 2, 3, None)) for _ in range(count))
    return [SlowTier(*each) for each in zip(slots, writes, reads, strict=True)]


@pytest.mark.parametrize(("count", "most"), [(1, 18), (2, 10)])
def test_no_schedule_over_tiers_of_slots_is_better(count: int, most: int) -> None:
    numbers = random.Random(count)
    for _ in range(150):
        steps, fast, slow = numbers.randint(1, most), LocalSlots(numbers.randint(1, 3)), random_tiers(numbers, count)
        schedule = optimum(steps, fast, *slow)
        assert schedule.extra == schedule.bound == pytest.approx(least_cost(steps, fast, *slow), abs=1e-9)
        assert played(schedule, fast, *slow) == pytest.approx(schedule.extra)


@pytest.mark.parametrize("count", [1, 2])
def test_no_schedule_over_bytes_and_tiers_is_better(count: int) -> None:
    numbers = random.Random(count)
    for _ in range(60):
        fast = OneTier(numbers.randint(1, 3), numbers.randint(1, 3), numbers.randint(3, 8))
        steps, slow = numbers.randint(1, 10), random_tiers(numbers, count)
        schedule = optimum(steps, fast, *slow)
        assert schedule.extra == pytest.approx(least_cost(steps, fast, *slow), abs=1e-9)
        assert played(schedule, fast, *slow) == pytest.approx(schedule.extra)


def test_two_tiers_equal_the_recurrence_over_all_lengths() -> None:
    numbers = random.Random(3)
    for _ in range(40):
        write, read = (numbers.choice((1, 10)) * numbers.random() for _ in range(2))
        steps, fast = numbers.randint(100, 220), LocalSlots(numbers.randint(1, 8))
        slow = SlowTier(numbers.choice((1, 2, 3, 5, 8, None)), write, read)
        found, exact = two_level(steps, fast, slow), tabled(stores(steps, fast, [slow]), steps)
        assert found.extra == pytest.approx(exact.extra)
        assert played(found, fast, slow) == pytest.approx(exact.extra)
        assert played(exact, fast, slow) == pytest.approx(exact.extra)


@pytest.mark.variants(4)
@pytest.mark.parametrize("steps", [6250, LONG])
@pytest.mark.parametrize("fast", [1, 8])
@pytest.mark.parametrize("slots", [1, 64, None])
def test_long_reversals_over_two_tiers(steps: int, fast: int, slots: int | None) -> None:
    """The optimum lies between a lower bound and a schedule that are found in another way."""
    for write, read in ((0.1, 0.1), (30.5, 2.25), (0.01, 3), (900, 700)):
        slow = SlowTier(slots, write, read)
        found = two_level(steps, LocalSlots(fast), slow)
        if fast > 1 or steps < LONG:
            other = blend(stores(steps, LocalSlots(fast), [slow]), steps)
            assert other.bound - 1e-6 <= found.extra <= other.extra + 1e-6
        assert found.extra <= least_extra(steps, fast)
        assert problems(found)[0] <= 1500


def test_a_schedule_of_6250_segments_plays_at_its_cost() -> None:
    for slow in (SlowTier(64, 5, 2), SlowTier(None, 0.5, 0.25), SlowTier(3, 200, 300)):
        assert (
            played(two_level(6250, LocalSlots(8), slow), LocalSlots(8), slow)
            == two_level(6250, LocalSlots(8), slow).extra
        )


def test_tiers_that_cost_nothing_are_more_slots() -> None:
    for steps in (5, 60, 1000):
        assert two_level(steps, LocalSlots(1), SlowTier(None, 0, 0)).extra == steps - 1
        assert two_level(steps, LocalSlots(3), SlowTier(0, 1, 1)).extra == least_extra(steps, 3)
        assert two_level(steps, LocalSlots(3), SlowTier(4, 10**9, 0)).extra == least_extra(steps, 3)


@pytest.mark.parametrize(
    ("steps", "fast", "slow"),
    [
        (6250, LocalSlots(8), (SlowTier(16, 0.5, 0.5), SlowTier(None, 4, 4))),
        (6250, OneTier(2, 3, 60), (SlowTier(20, 0.5, 0.5), SlowTier(None, 14, 4))),
        (6250, OneTier(1, 5, 100), (SlowTier(None, 2, 1.5),)),
        (LONG, OneTier(4, 1, 100), (SlowTier(None, 30, 20),)),
    ],
)
def test_long_reversals_over_many_tiers_state_their_gap(
    steps: int, fast: OneTier | LocalSlots, slow: tuple[SlowTier, ...]
) -> None:
    schedule = optimum(steps, fast, *slow)
    assert 0 <= gap(schedule) <= schedule.extra / 1000
    assert played(schedule, fast, *slow) == pytest.approx(schedule.extra)
    assert problems(schedule)[0] <= 200


def test_the_bound_holds_over_three_tiers() -> None:
    numbers = random.Random(4)
    for _ in range(40):
        steps, fast, slow = numbers.randint(30, 70), LocalSlots(numbers.randint(1, 4)), random_tiers(numbers, 2)
        tiers = stores(steps, fast, slow)
        found, exact = blend(tiers, steps), tabled(tiers, steps)
        assert found.bound - 1e-6 <= exact.extra <= found.extra + 1e-6
        assert played(found, fast, *slow) == pytest.approx(found.extra)
        assert math.isfinite(found.extra)


def test_no_steps_are_refused() -> None:
    with pytest.raises(OptionError, match="steps=0, but steps must be at least 1"):
        two_level(0, LocalSlots(1), SlowTier(1, 1, 1))
