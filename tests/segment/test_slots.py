"""Where the inputs of a segment are: one table, and what makes and reads them by it."""

import pytest
import torch

from reroll.segment.trace import constant_names, first_step, segment_inputs, trace
from six_inputs import ITEMS, SEQUENCE, STEPS, WEIGHT, operands, six_inputs

CARRIES = [(0,), (1,)]


@pytest.mark.parametrize(
    ("steps", "items", "numbers", "constants"),
    [(1, range(3, 4), range(4, 5), range(5, 6)), (3, range(3, 6), range(6, 7), range(7, 8))],
)
def test_the_places_of_inputs(steps: int, items: range, numbers: range, constants: range) -> None:
    recurrence = six_inputs()
    slots = recurrence.slots(steps)
    assert (slots.steps, slots.carries, slots.constants) == (steps, range(2), constants)
    assert slots.xs == tuple(zip((range(2, 3), items, numbers), recurrence.xs, strict=True))
    assert slots.operands == (*CARRIES, (SEQUENCE,), *[ITEMS] * steps, (), (WEIGHT,))


def test_without_inputs_there_are_no_places() -> None:
    slots = six_inputs().slots(0)
    assert (slots.xs[1][0], slots.constants) == (range(3, 3), range(4, 5))


def test_segments_are_given_what_the_table_says() -> None:
    recurrence, given = six_inputs(), operands()
    slots = recurrence.slots(2)
    inputs = [*given[:2], *segment_inputs(recurrence, given, 1, 2)]
    assert len(inputs) == len(slots.operands) == slots.constants.stop
    (sequence, _), (items, _), (numbers, _) = slots.xs
    assert torch.equal(inputs[sequence[0]], given[SEQUENCE][1:3])  # steps 1 and 2 read rows 2 and 1
    assert [inputs[place] for place in items] == [given[ITEMS[1]], given[ITEMS[2]]]
    assert inputs[numbers[0]].tolist() == [2.0, 3.0]
    assert [inputs[place] for place in slots.constants] == [given[WEIGHT]]


def test_the_first_step_is_given_one_of_each() -> None:
    recurrence, given = six_inputs(), operands()
    h, c, x, item, number, weight = first_step(recurrence, given)
    assert (h, c, item, weight) == (given[0], given[1], given[ITEMS[0]], given[WEIGHT])
    assert (x.tolist(), number.item()) == (given[SEQUENCE][STEPS - 1].tolist(), 1.0)


def test_the_placeholders_of_a_step() -> None:
    names = [[node.name for node in nodes] for nodes in six_inputs().inputs]
    assert names == [["h_b", "c_b"], ["x_b", "item_b", "number"], ["weight_b"]]
    assert constant_names(six_inputs()) == names[2]


def test_a_segment_steps_as_its_step_does() -> None:
    recurrence, given = six_inputs(), operands()
    made = trace(recurrence, STEPS, decompose=False)
    primals = made.graph.graph.find_nodes(op="placeholder")[: made.inputs_total]
    kinds = [next(iter({"carry", "per_step", "constant"} & set(node.meta))) for node in primals]
    assert kinds == ["carry"] * 2 + ["per_step"] * (1 + STEPS + 1) + ["constant"]
    assert [primals[0].meta["carry"], primals[1].meta["carry"], primals[-1].meta["constant"]] == [0, 1, "weight_b"]
    inputs = [*given[:2], *segment_inputs(recurrence, given, 0, STEPS)]
    tangents = [torch.zeros(made.results[index].shape) for index in made.tangents]
    found = made.graph(inputs, tangents)
    carries, rows = given[:2], []
    for t in range(STEPS):
        read = given[SEQUENCE][STEPS - 1 - t], given[ITEMS[t]], torch.tensor(t + 1.0)
        *carries, row = recurrence.step(*carries, *read, given[WEIGHT])
        rows.append(row)
    for ours, theirs in zip(found, [*carries, torch.stack(rows)], strict=False):
        torch.testing.assert_close(ours, theirs)
