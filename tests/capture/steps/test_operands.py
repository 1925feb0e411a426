"""What each operand of a step is to the step, for loops written out by hand in the normal form.

In the tables a value of the same step is ``#place``, a carry ``#place of 2 steps ago (of one step before the first, of
two)``, a value from outside its name, items ``[a, b, c]``, a moving index ``start + stride r``, numbers ``{1, 0.5}``,
and anything that is no value ``.``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from by_hand import filled, written
from reroll.capture.steps.node_hash import Likeness, Sequence
from reroll.capture.steps.numbers import may_move
from reroll.capture.steps.operands import (
    Carried,
    Constant,
    Index,
    Inner,
    ItemsOf,
    Literal,
    Moving,
    Operand,
    Region,
    classify,
    why_not,
    window,
)

X, W, H, G = filled(9, 2), filled(2, 2), filled(2), filled(2)


def plain(x: Any, w: Any, h: Any, g: Any) -> Any:
    for t in range(5):
        h = torch.tanh(torch.add(torch.mv(w, h), torch.select(x, 0, t)))
    return h


def backwards(x: Any, w: Any, h: Any, g: Any) -> Any:
    for t in range(4):
        h = torch.add(h, torch.select(x, 0, 8 - 2 * t))
    return h


def two_steps_ago(x: Any, w: Any, h: Any, g: Any) -> Any:
    for _ in range(5):
        h, g = torch.add(h, g), h
    return h


def two_carries(x: Any, w: Any, h: Any, g: Any) -> Any:
    for _ in range(4):
        h = torch.tanh(torch.add(h, g))
        g = torch.sin(g)
    return h


def items(x: Any, w: Any, h: Any, g: Any) -> Any:
    a, b, c = torch.sin(h), torch.cos(h), torch.exp(g)
    for value in (a, b, c):
        h = torch.add(h, value)
    return h


def numbers(x: Any, w: Any, h: Any, g: Any) -> Any:
    for t in range(4):
        h = torch.mul(h, 0.5**t)
    return h


def stays(x: Any, w: Any, h: Any, g: Any) -> Any:
    for _ in range(4):
        h = torch.mul(h, 0.5)
    return h


def uneven(x: Any, w: Any, h: Any, g: Any) -> Any:
    for t in (0, 1, 3, 4):
        h = torch.add(h, torch.select(x, 0, t))
    return h


def now_outside(x: Any, w: Any, h: Any, g: Any) -> Any:
    for t in range(4):
        h = torch.add(torch.sin(g if t == 2 else h), w)
    return h


def varying(x: Any, w: Any, h: Any, g: Any) -> Any:
    for t in range(5):
        h, g = torch.add(h, h if t == 3 else g), h
    return h


def one_and_then_two(x: Any, w: Any, h: Any, g: Any) -> Any:
    made = [h]
    for at in (0, 1, 1, 2, 3, 4):
        made.append(torch.sin(made[at]))
    return made[-1]


def apart(x: Any, w: Any, h: Any, g: Any) -> Any:
    return [torch.sin(torch.select(x, 0, t)) for t in range(6)]


def sequence_of(function: Callable[..., Any], likeness: Likeness = Likeness.EXACT, maps: bool = False) -> Sequence:
    module = written(function, X, W, H, G)
    return Sequence(module, module.graph, likeness, maps)


def spelled(operand: Operand) -> str:
    match operand:
        case Inner(place):
            return f"#{place}"
        case Carried(place, initial):
            return f"#{place} of {operand.delay} ago ({', '.join(node.name for node in initial)})"
        case Constant(node):
            return node.name
        case ItemsOf(nodes):
            return f"[{', '.join(node.name for node in nodes)}]"
        case Moving(values):
            return f"{{{', '.join(f'{value:g}' for value in values)}}}"
        case Index(start, stride):
            return f"{start} + {stride} r"
        case Literal():
            return "."


def told(sequence: Sequence, region: Region) -> list[str] | None:
    found = classify(sequence, region)
    return None if found is None else [" | ".join(map(spelled, operands)) for operands in found]


NUMBERS, MAPS = {"likeness": Likeness.NUMBERS}, {"maps": True}
SECOND = "x | . | 1 + 1 r"
STEP = ["w | #3 of 1 ago (h)", "x | . | 0 + 1 r", "#0 | #1", "#2"]
FOUND: tuple[tuple[Callable[..., Any], dict[str, Any], Region, list[str]], ...] = (
    (plain, {}, Region(0, 4, 5), STEP),
    (plain, {}, Region(4, 4, 4), ["w | #3 of 1 ago (tanh)", SECOND, *STEP[2:]]),
    (
        plain,
        {},
        Region(2, 4, 4),
        ["#2 of 1 ago (mv) | #3 of 1 ago (select)", "#0", "w | #1", SECOND],
    ),
    (backwards, {}, Region(0, 2, 4), ["x | . | 8 + -2 r", "#1 of 1 ago (h) | #0"]),
    (two_steps_ago, {}, Region(0, 1, 5), ["#0 of 1 ago (h) | #0 of 2 ago (h, g)"]),
    (two_carries, {}, Region(0, 3, 4), ["#1 of 1 ago (h) | #2 of 1 ago (g)", "#0", "#2 of 1 ago (g)"]),
    (items, {}, Region(3, 1, 3), ["#0 of 1 ago (h) | [sin, cos, exp]"]),
    (numbers, NUMBERS, Region(0, 1, 4), ["#0 of 1 ago (h) | {1, 0.5, 0.25, 0.125}"]),
    (stays, NUMBERS, Region(0, 1, 4), ["#0 of 1 ago (h) | ."]),
    (apart, MAPS, Region(0, 2, 6), ["x | . | 0 + 1 r", "#0"]),
)


@pytest.mark.parametrize(("function", "kind", "region", "expected"), FOUND)
def test_the_relations_of_operands(
    function: Callable[..., Any], kind: dict[str, Any], region: Region, expected: list[str]
) -> None:
    assert told(sequence_of(function, **kind), region) == expected


SPELLED: dict[str, Callable[[Any, Any, int], Any]] = {
    "by another name": lambda h, g, t: torch.multiply(h, 0.5**t),
    "by a method": lambda h, g, t: h.true_divide(t + 1),
    "compared": lambda h, g, t: torch.add(h, torch.greater(g, t)),
    "compared by a method": lambda h, g, t: torch.add(h, g.le(t)),
    "the number first": lambda h, g, t: torch.pow(0.5**t, h),
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_number_may_be_another_one_at_each_step_however_the_arithmetic_is_spelled(name: str) -> None:
    def call(x: Any, w: Any, h: Any, g: Any) -> Any:
        for t in range(4):
            h = SPELLED[name](h, g, t)
        return h

    sequence = sequence_of(call, Likeness.NUMBERS)
    found = classify(sequence, Region(0, len(sequence.nodes) // 4, 4))
    assert found is not None
    assert sum(isinstance(operand, Moving) for operands in found for operand in operands) == 1


def test_an_operator_of_torch_takes_a_number_or_a_tensor() -> None:
    graph = fx.Graph()
    h = graph.placeholder("h")
    h.meta["example_value"] = H
    assert not may_move(graph.call_function(torch.ops.aten.mul.Scalar, (h, 0.5)), 1)
    assert may_move(graph.call_function(torch.mul, (h, 0.5)), 1)


UNEVEN = "the index at node select does not move evenly: 0, 1, 3, 4, ..."
MIXED = "an operand at node {} is now a value of the steps, now one from outside, or from varying steps ago"
REFUSED: tuple[tuple[Callable[..., Any], dict[str, Any], Region, str], ...] = (
    (uneven, {}, Region(0, 2, 4), UNEVEN),
    (now_outside, {}, Region(0, 2, 4), MIXED.format("sin")),
    (varying, {}, Region(0, 1, 5), MIXED.format("add")),
    (one_and_then_two, {}, Region(0, 1, 6), MIXED.format("sin")),
    (apart, {}, Region(0, 2, 6), "no value is carried from step to step"),
    (apart, MAPS, Region(0, 2, 4), "no value is carried from step to step"),
)


@pytest.mark.parametrize(("function", "kind", "region", "reason"), REFUSED)
def test_what_is_no_step_and_why(
    function: Callable[..., Any], kind: dict[str, Any], region: Region, reason: str
) -> None:
    sequence = sequence_of(function, **kind)
    assert told(sequence, region) is None
    assert why_not(sequence, region).startswith(reason)


def test_steps_whose_operands_agree_are_refused_for_something_else() -> None:
    assert why_not(sequence_of(plain), Region(0, 4, 5)).startswith("its steps differ in their gradient modes")


WINDOWS: tuple[tuple[Callable[..., Any], Region, Region | None], ...] = (
    (plain, Region(0, 4, 5), Region(0, 4, 5)),
    (plain, Region(0, 4, 2), None),  # too short
    (uneven, Region(0, 2, 4), None),  # two steps and two
    (now_outside, Region(0, 2, 4), None),
    (apart, Region(0, 2, 6), None),  # nothing is carried
)


@pytest.mark.parametrize(("function", "region", "expected"), WINDOWS)
def test_the_longest_stretch_that_keeps_its_relations(
    function: Callable[..., Any], region: Region, expected: Region | None
) -> None:
    assert window(sequence_of(function), region) == expected


@pytest.mark.parametrize(("other", "expected"), [(0, Region(1, 1, 7)), (4, Region(0, 1, 4)), (7, Region(0, 1, 7))])
def test_a_step_that_reads_another_value_ends_the_stretch(other: int, expected: Region) -> None:
    def function(x: Any, w: Any, h: Any, g: Any) -> Any:
        for t in range(8):
            h = torch.add(h, w if t == other else x)
        return h

    module = written(function, H, G, H, G)
    assert window(Sequence(module, module.graph), Region(0, 1, 8)) == expected
