"""Optimal costs equal those of the package checkpoint_schedules.

It is LGPL: an oracle of these tests, of which nothing is copied. Its forward and backward costs are uf and ub. Its
``get_hopt_table`` takes them as (..., ub, uf), but its own ``hrevolve`` passes (..., uf, ub), so that the table
by which it chooses where to stop has the two swapped. Here the table is called as it is declared.
"""

import inspect
from itertools import product

import pytest

from reroll.schedules.optimal.best import optimum
from reroll.schedules.optimal.problem import LocalSlots, OneTier, SlowTier
from reroll.schedules.optimal.revolve import least_extra

pytest.importorskip("checkpoint_schedules")

from checkpoint_schedules.hrevolve_sequences.hrevolve import get_hopt_table
from checkpoint_schedules.mixed import optimal_steps_mixed
from checkpoint_schedules.multistage import optimal_steps_binomial

STEPS = 40


def test_revolve() -> None:
    for slots in range(1, 8):
        for steps in range(slots + 1, 70):
            assert steps + least_extra(steps, slots) == optimal_steps_binomial(steps, slots)


@pytest.mark.variants(4)
@pytest.mark.parametrize("slots", [(1, 1), (1, 4), (2, 2), (3, 1), (3, 4)])
def test_two_tiers(slots: tuple[int, int]) -> None:
    for write, read, forward, backward in product((0.5, 2, 7), (0.25, 5), (1, 3), (0, 2)):
        _, table = get_hopt_table(STEPS, slots, (0, write), (0, read), backward, forward)
        slow = SlowTier(slots[1], write / forward, read / forward)
        for steps in range(2, STEPS + 1):
            extra = optimum(steps, LocalSlots(slots[0]), slow).extra
            assert extra * forward + steps * backward == pytest.approx(table[1][steps - 1][slots[1]])


def test_the_arguments_are_in_the_order_that_is_said_above() -> None:
    assert list(inspect.signature(get_hopt_table).parameters)[-2:] == ["ub", "uf"]


@pytest.mark.parametrize("slots", [(1, 1, 2), (1, 2, 2), (2, 1, 3)])
def test_three_tiers(slots: tuple[int, int, int]) -> None:
    for writes, reads in (((1, 3), (1, 2)), ((2.5, 9), (1, 9)), ((0.5, 1), (0.5, 1))):
        _, table = get_hopt_table(STEPS, slots, (0, *writes), (0, *reads), 0, 1)
        slow = [SlowTier(*each) for each in zip(slots[1:], writes, reads, strict=True)]
        for steps in range(2, STEPS + 1, 3):
            extra = optimum(steps, LocalSlots(slots[0]), *slow).extra
            assert extra == pytest.approx(table[2][steps - 1][slots[2]])


def test_slots_for_carries_and_tapes() -> None:
    """Slots that hold either (Maddison 2024): there the first carry takes one, until the run restarts from it last.

    Here it is held elsewhere, so that one slot more, which is theirs for the tape at work, is never worse; without that
    slot it is never better.
    """
    for slots in range(1, 6):
        for steps in range(2, 50):
            mixed = optimal_steps_mixed(steps, slots) - steps
            assert optimum(steps, OneTier(1, 1, slots + 1)).extra <= mixed <= optimum(steps, OneTier(1, 1, slots)).extra
