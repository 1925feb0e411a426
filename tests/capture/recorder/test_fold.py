"""Folding: nothing of a record is lost, and what repeats is stored once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from networks_zoo import Net, load
from reroll.capture.recorder.events import LITERALS, Recorder, markers, recording
from reroll.capture.recorder.fold import Fold, Item, unfold

UNRECORDED = {"condition"}
GROWN = {
    *("ring_buffer", "scalars", "dt_numbers", "bfloat_scalars", "eligibility"),  # tables of a user's numbers
    *("list_inputs", "list_layouts"),  # a tensor a step from outside, each a key of its own
    *("skip_inputs_two_rates", "list_mixed_grad"),  # what is left of a period
    "vmapped",  # a view of each row
}

Told = tuple[Any, ...]
"""A key, numbers, and which of these are free."""


def folded(record: Sequence[Told] | Iterator[Told]) -> tuple[Item, ...]:
    fold = Fold()
    for each in record:
        fold.see(*each)
    return fold.done()


def told(items: Sequence[Item]) -> list[tuple[Any, str]]:
    """As text, in which -0.0, 0 and NaN differ from what they equal."""
    return [(each.key, repr(each.numbers)) for each in unfold(items)]


def as_told(record: Sequence[Told]) -> list[tuple[Any, str]]:
    return [(key, repr(tuple(numbers[0]) if numbers else ())) for key, *numbers in record]


def shape(items: Sequence[Item]) -> list[Any]:
    """Runs and bodies of loops, and keys."""
    return [(each.runs, shape(each.body)) if each.body else each.key for each in items]


def steps(count: int, *items: Callable[[int], Told]) -> list[Told]:
    return [item(t) for t in range(count) for item in items]


def a(t: int) -> Told:
    return "a", (t, 7)


def b(_: int) -> Told:
    return ("b",)


def inner(count: int, t: int) -> list[Told]:
    """A loop whose numbers grow with its own runs, and with those of the loop around it."""
    return [("a", (t, 3 * k + t)) for k in range(count)]


def lit(value: Callable[[int], float]) -> Callable[[int], Told]:
    """A literal of the user's, and a number of the recording."""
    return lambda t: ("lit", (value(t), t), (True, False))


RECORDS: dict[str, tuple[Callable[[int], list[Told]], Any]] = {
    "evenly": (lambda T: steps(T, a, b), lambda T: [(T, ["a", "b"])]),
    "too few": (lambda _: steps(2, a, b), lambda _: ["a", "b", "a", "b"]),
    "around": (lambda T: [("x",), *steps(T, a), ("y",)], lambda T: ["x", (T, ["a"]), "y"]),
    "a table": (lambda T: steps(T, lit(lambda t: 0.9**t), b), lambda T: [(T, ["lit", "b"])]),
    "a late literal": (lambda T: steps(T, lit(lambda t: float(t == 9)), b), lambda T: [(T, ["lit", "b"])]),
    "a number that stops": (
        lambda T: steps(T, lambda t: ("a", (min(t, 5),))),
        lambda T: [(6, ["a"]), (T - 6, ["a"])],
    ),
    "a branch": (
        lambda T: [each for t in range(T) for each in (a(t), *([b(t)] if t == 7 else []))],
        lambda T: [(8, ["a"]), "b", (T - 8, ["a"])],
    ),
    "a period and what is left": (
        lambda T: [each for t in range(2 * T + 1) for each in ([a(t)] if t % 2 else [a(t), b(t)])],
        lambda T: [(T, ["a", "b", "a"]), "a", "b"],
    ),
    "a loop in a loop": (
        lambda T: [each for t in range(T) for each in (b(t), *inner(4, t))],
        lambda T: [(T, ["b", (4, ["a"])])],
    ),
    "a loop in a loop in a loop": (
        lambda T: [
            each for t in range(T) for each in (b(t), *(x for k in range(5) for x in (a(k), *inner(4, t + 3 * k))))
        ],
        lambda T: [(T, ["b", (5, ["a", (4, ["a"])])])],
    ),
    "inner tables": (
        lambda T: [each for t in range(T) for each in (b(t), *(("lit", (0.5**k,), (True,)) for k in range(5)))],
        lambda T: [(T, ["b", (5, ["lit"])])],
    ),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("T", [12, 13, 300])
def test_what_repeats_is_one_loop(name: str, T: int) -> None:
    record, expected = RECORDS[name]
    items = folded(record(T))
    assert told(items) == as_told(record(T))
    assert shape(items) == expected(T)


def test_a_fold_is_as_large_for_any_number_of_runs() -> None:
    for name, (record, _) in RECORDS.items():
        if name not in ("a table", "a late literal"):
            assert len({sum(each.size for each in folded(record(T))) for T in (40, 41, 900)}) == 1, name


def test_no_more_is_held_on_the_way() -> None:
    fold, most = Fold(), 0
    for each in RECORDS["a loop in a loop in a loop"][0](200):
        fold.see(*each)
        most = max(most, fold.size)
    assert most < 200


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 0.0, 1e300, True])
def test_numbers_are_what_they_are(value: float) -> None:
    """One that is the same in all runs is in no table, whatever it is."""
    record = [("a", (value, t), (True, False)) for t in range(9)]
    items = folded(record)
    assert told(items) == as_told(record)
    assert items[0].tabled == (False, False)


def test_minus_zero_is_no_zero() -> None:
    record = [("a", (-0.0 if t > 6 else 0.0,), (True,)) for t in range(12)]
    assert told(folded(record)) == as_told(record)


def test_sums_that_are_rounded_are_kept() -> None:
    """0.1 added nine times is not 0.9: what grows evenly but for rounding is a table."""
    values = [0.1]
    while len(values) < 20:
        values.append(values[-1] + 0.1)
    record = [("a", (value,), (True,)) for value in values]
    assert told(folded(record)) == as_told(record)
    assert told(folded([(*each[:2], (False,)) for each in record])) == as_told(record)


def drawn(draw: random.Random, depth: int = 3) -> list[Told]:
    """A record of loops in loops, whose bodies are cut short, skipped and changed now and then."""
    keys = [f"k{number}" for number in range(4)]
    free = {key: tuple(draw.random() < 0.5 for _ in range(number % 3)) for number, key in enumerate(keys)}

    def items(depth: int) -> Callable[[int], list[Told]]:
        if not depth or draw.random() < 0.3:
            key = draw.choice(keys)
            first, grows = (
                [draw.choice((0, 1, 0.1, 5)) for _ in free[key]],
                [draw.choice((0, 0, 1, 0.1)) for _ in free[key]],
            )
            odd = draw.choice((0.0, 0.0, 0.0, 0.05))

            def event(t: int) -> list[Told]:
                changed = draw.random() < odd
                return [(key, tuple(x + g * t + 3 * changed for x, g in zip(first, grows, strict=True)), free[key])]

            return event
        parts = [items(depth - 1) for _ in range(draw.randint(1, 3))]
        runs, odd = draw.choice((1, 2, 3, 4, 9)), draw.choice((0.0, 0.0, 0.1))

        def loop(t: int) -> list[Told]:
            stop = draw.randint(0, runs) if draw.random() < odd else runs
            inner = draw.choice((0, t))
            return [each for r in range(stop) for part in parts for each in part(r + inner)]

        return loop

    return [each for part in range(3) for each in items(depth)(part)]


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in (0, 40, 80)], ids=str)
def test_nothing_is_lost(seeds: range) -> None:
    for seed in seeds:
        record = drawn(random.Random(seed))
        assert told(folded(record)) == as_told(record), seed


def recorded(name: str, steps: int) -> tuple[list[Told], tuple[Item, ...]]:
    """What a network of the zoo does, and that folded."""
    torch.manual_seed(0)
    net, fold, record = load()[name], Fold(), list[Told]()

    def see(colour: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        record.append((colour, numbers, tuple(marker in LITERALS for marker in markers(colour))))
        fold.see(*record[-1])

    inputs = net.inputs(steps)
    recorder = Recorder(see, {id(each): f"input {at}" for at, each in enumerate(inputs) if isinstance(each, Tensor)})
    with recording(recorder):
        recorder.give("result", Net(net)(*inputs))
    return record, fold.done()


def test_what_networks_do_is_folded() -> None:
    """Nothing is lost, and nearly all are as large for any number of steps."""
    grown = set()
    for name in load():
        if name in UNRECORDED:
            continue
        sizes = set()
        for steps in (20, 40):
            record, items = recorded(name, steps)
            assert told(items) == as_told(record), name
            sizes.add(sum(each.size for each in items))
        if len(sizes) > 1:
            grown.add(name)
    assert grown - {"checkpointed"} == GROWN  # which grows on torch 2.11
