"""One tier: revolve in closed form, and carries and tapes that share bytes, against searches through all schedules."""

import random
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import ORACLE
from reroll.errors import BudgetError, OptionError
from reroll.schedules.optimal.best import farthest, optimum
from reroll.schedules.optimal.blend import blend
from reroll.schedules.optimal.problem import LocalSlots, OneTier, Piece, SlowTier, gap, stores
from reroll.schedules.optimal.revolve import least_extra, parts, reach, reach_sum
from reroll.schedules.optimal.tabled import tabled
from reversals import LONG, least_runs, played, problems


def test_revolve_meets_the_oracle() -> None:
    for steps, slots, extra in ORACLE["revolve"]["rows"]:
        schedule = optimum(steps, LocalSlots(slots))
        assert (schedule.extra, gap(schedule)) == (extra, 0)
        if extra <= 1000:
            assert played(schedule, LocalSlots(slots)) == extra


def test_revolve_meets_the_recurrence_of_slots_that_hold_tapes() -> None:
    """The least runs, all counted, if a slot holds a step's tape and the carry behind it instead of a carry: Gruslys et
    al. (2016), arXiv 1606.03401, section 3.2. With one segment more it is the recurrence of revolve."""

    def taped_slots(steps: int, slots: int) -> int:
        return least_extra(steps + 1, slots)

    for steps, slots, forward in ORACLE["taped_slots"]["rows"]:
        assert taped_slots(steps, slots) == forward

    @lru_cache(None)
    def least(steps: int, slots: int) -> int:
        if slots == 0 and steps:
            return 10**9
        cuts = (y + least(steps - y, slots - 1) + least(y - 1, slots) for y in range(1, steps + 1))
        return min(cuts, default=0) if slots > 1 else steps * (steps + 1) // 2

    for steps in range(1, 30):
        for slots in range(1, 6):
            assert taped_slots(steps, slots) == least(steps, slots)


def test_a_price_finds_the_same_as_the_closed_form() -> None:
    for slots in (1, 2, 3, 5, 9, 40):
        for steps in (1, 2, 7, 100, 999, LONG if slots > 1 else 5):
            found = blend(stores(steps, LocalSlots(slots)), steps)
            assert found.extra == found.bound == least_extra(steps, slots)


def test_sums_of_binomials() -> None:
    for slots in range(1, 5):
        for runs in range(-1, 6):
            assert reach_sum(slots, runs) == sum(reach(slots, each) for each in range(runs + 1))
            assert runs < 0 or farthest(LocalSlots(slots), runs, LONG) == reach(slots, runs)


def test_all_parts_but_one_have_one_of_two_lengths() -> None:
    for steps in range(2, 300):
        for slots in (1, 2, 3, 4, 8):
            lengths = parts(steps, slots)
            ends = [{reach(slots - at, runs) for runs in range(steps)} for at in range(slots)]
            assert sum(lengths) == steps
            if len(lengths) == slots + 1:
                assert sum(each not in known for each, known in zip(lengths, ends, strict=False)) <= 1


@pytest.mark.variants(4)
@pytest.mark.parametrize(("carry", "tape", "most"), [(1, 1, 4), (2, 1, 5), (3, 1, 6), (1, 2, 5), (2, 3, 8), (3, 2, 7)])
def test_no_schedule_in_bytes_is_better(carry: int, tape: int, most: int) -> None:
    """The search may tape in any run, so that it shows too that keeping early tapes does not help."""
    for memory in range(tape, most + 1):
        for steps in range(1, 7):
            fast = OneTier(carry, tape, memory)
            schedule = optimum(steps, fast)
            assert schedule.extra == schedule.bound == least_runs(steps, fast)


SIZES = st.builds(
    lambda carry, tape, tapes, more: OneTier(carry, tape, tape * tapes + more),
    *(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 5)),
)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 90))
def test_tables_lie_between_bound_and_blend(fast: OneTier, steps: int) -> None:
    tiers = stores(steps, fast)
    exact, found = tabled(tiers, steps), blend(tiers, steps)
    assert found.bound <= exact.extra <= found.extra <= exact.extra + 2
    assert played(found, fast) == found.extra
    assert played(exact, fast) == exact.extra
    assert isinstance(exact.extra, int)
    assert isinstance(found.extra, int)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 2000), st.integers(1, 7))
def test_more_memory_or_fewer_segments_never_cost_more(fast: OneTier, steps: int, more: int) -> None:
    found = optimum(steps, fast)
    assert optimum(steps, OneTier(fast.carry, fast.tape, fast.memory + more)).bound <= found.extra
    assert found.bound <= optimum(steps + more, fast).extra


def test_carries_and_tapes_of_one_size_are_proved_optimal() -> None:
    for steps in (500, 6250, LONG):
        for memory in (2, 3, 10, 37, 150, 400):
            assert gap(optimum(steps, OneTier(1, 1, memory))) == 0


def test_the_gap_stays_small_in_any_sizes() -> None:
    numbers = random.Random(5)
    for _ in range(80):
        carry, tape = numbers.randint(1, 100), numbers.randint(1, 100)
        fast = OneTier(carry, tape, max(tape * numbers.randint(1, 300), carry))
        schedule = optimum(LONG, fast)
        assert 0 <= gap(schedule) <= 12 + 2 * carry // tape
        assert gap(schedule) <= schedule.extra / 1000


@pytest.mark.parametrize(
    ("fast", "most"),
    [
        (LocalSlots(3), 300),
        (LocalSlots(8), 150),
        (LocalSlots(64), 250),
        (OneTier(1, 1, 100), 300),
        (OneTier(1, 5, 160), 400),
        (OneTier(1, 64, 1920), 2500),
        (OneTier(64, 1, 640), 100),
    ],
)
def test_a_long_plan_has_few_different_pieces(fast: OneTier | LocalSlots, most: int) -> None:
    schedule = optimum(LONG, fast)
    number, depth = problems(schedule)
    assert number <= most
    assert farthest(fast, depth - 1, LONG) < LONG == farthest(fast, depth, LONG)


def test_parts_in_order_have_less_and_less_room() -> None:
    for fast in (LocalSlots(8), OneTier(2, 3, 120)):
        schedule = optimum(LONG, fast)
        *kept, last = schedule.pieces(schedule.root)
        assert last.tier is None
        assert [before.room - after.room for before, after in pairwise(kept)] == [1] * (len(kept) - 1)
        assert kept[0].room == schedule.root.room


def test_where_no_further_carry_fits_block_after_block_is_taped() -> None:
    schedule = optimum(LONG, OneTier(10, 3, 9))
    assert schedule.extra == sum(LONG - 3 * k for k in range(1, LONG // 3 + 1)) == schedule.bound
    assert [part.length for part in schedule.pieces(schedule.root)] == [LONG - 3, 3]
    assert played(optimum(20, OneTier(10, 3, 9)), OneTier(10, 3, 9)) == optimum(20, OneTier(10, 3, 9)).extra


def test_farthest_is_the_most_that_so_many_runs_reach() -> None:
    fast = OneTier(2, 3, 11)

    @lru_cache(None)
    def fewest(steps: int, memory: int) -> int:
        """The least number of extra runs of the segment that has most."""
        if steps <= memory // fast.tape:
            return 0
        if memory < fast.tape:
            return 10**9
        right = [fewest(steps - j, memory - fast.carry) if memory >= fast.carry else 10**9 for j in range(1, steps)]
        taped = [0 if steps - j <= memory // fast.tape else 10**9 for j in range(1, steps)]
        cuts = (max(1 + fewest(j, memory), min(right[j - 1], taped[j - 1])) for j in range(1, steps))
        return min(cuts, default=10**9)

    for runs in range(4):
        most = farthest(fast, runs, LONG)
        assert fewest(most, fast.memory) <= runs < fewest(most + 1, fast.memory)


def test_one_segment_is_taped_at_once() -> None:
    for fast in (LocalSlots(1), LocalSlots(5), OneTier(4, 2, 2)):
        schedule = optimum(1, fast)
        assert schedule.extra == 0
        assert schedule.pieces(schedule.root) == ()
        assert schedule.pieces(Piece(1, None, 0)) == ()


def test_what_cannot_be_reversed_is_refused() -> None:
    with pytest.raises(BudgetError, match="do not hold the tape of one segment, 3 units") as refusal:
        OneTier(1, 3, 2)
    assert refusal.value.nbytes == 3
    for wrong in (lambda: OneTier(0, 1, 1), lambda: OneTier(1, 0, 1), lambda: LocalSlots(0)):
        with pytest.raises(OptionError, match="must be at least 1"):
            wrong()
    for fast in (LocalSlots(2), OneTier(1, 1, 1)):
        with pytest.raises(OptionError, match="steps=0, but steps must be at least 1"):
            optimum(0, fast)
    with pytest.raises(OptionError, match="slots=-1, but slots must be at least 0"):
        SlowTier(-1, 1, 1)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="must be a finite cost"):
            SlowTier(1, cost, 1)
        with pytest.raises(OptionError, match="must be a finite cost"):
            SlowTier(1, 1, cost)
