"""The graph around a recurrence: how lists of its rows are taken, whole where that can be.

``y`` and ``z`` are the stacked outputs of a recurrence of six steps, ``y0`` to ``y5`` and ``z0`` to ``z5`` the values
of its steps in the old graph, ``a`` a value from outside. Each list is gathered, and what is emitted gives the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from by_hand import calls, filled
from reroll.capture.steps.outer import Outer

STEPS, B, H = 6, 2, 3
INPUTS = {"a": -filled(B, H), "y": filled(STEPS, B, H), "z": 100 + filled(STEPS, B, H)}


def around() -> tuple[Outer, dict[str, fx.Node]]:
    """An outer graph that holds the stacked outputs, and the old nodes by their names."""
    outer, old, olds = Outer(), fx.Graph(), dict[str, fx.Node]()
    for name, value in INPUTS.items():
        made = outer.graph.placeholder(name)
        made.meta["example_value"] = value
        if name == "a":
            olds[name] = old.placeholder(name)
            olds[name].meta["example_value"] = value
            outer.env[olds[name]] = made
            continue
        for row in range(STEPS):
            node = olds[f"{name}{row}"] = old.placeholder(f"{name}{row}")
            node.meta["example_value"] = value[row]
            outer.emitted[node] = made, row
    return outer, olds


def spelled(node: Any) -> str:
    """A value with all that it is made of."""
    if isinstance(node, list | tuple):
        return f"[{', '.join(map(spelled, node))}]"
    if isinstance(node, slice):
        return f"{node.start}:{node.stop}:{node.step}"
    if not isinstance(node, fx.Node) or node.op == "placeholder":
        return str(node)
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return f"{name}({', '.join(map(spelled, node.args))})"


def value(outer: Outer, result: fx.Node) -> Any:
    outer.graph.output(result)
    outer.graph.lint()
    return fx.GraphModule({}, outer.graph)(*INPUTS.values())


STACKED: tuple[tuple[str, int, str], ...] = (
    ("y0 y1 y2 y3 y4 y5", 0, "y"),
    ("y1 y2 y3", 0, "narrow(y, 0, 1, 3)"),
    ("y4 y5", 0, "narrow(y, 0, 4, 2)"),
    ("y0 y2 y4", 0, "contiguous(getitem(y, 0:6:2))"),
    ("y5 y4 y3 y2 y1 y0", 0, "flip(y, [0])"),
    ("y3 y2 y1", 0, "flip(narrow(y, 0, 1, 3), [0])"),
    ("y0 y1 y2 y3 y4 y5", 1, "contiguous(movedim(y, 0, 1))"),
    ("a y0 y1 y2 y3 y4 y5", 0, "cat([unsqueeze(a, 0), y], 0)"),
    ("y0 y1 y2 a a", 0, "cat([narrow(y, 0, 0, 3), unsqueeze(a, 0), unsqueeze(a, 0)], 0)"),
    (
        "y0 z0 y1 z1 y2 z2",
        0,
        "flatten(stack([narrow(y, 0, 0, 3), narrow(z, 0, 0, 3)], 1), 0, 1)",
    ),
    ("y0 y2 y5", 0, "stack([getitem(unbind(y, 0), 0), getitem(unbind(y, 0), 2), getitem(unbind(y, 0), 5)], 0)"),
    ("y0 y0 y0", 0, "stack([getitem(unbind(y, 0), 0), getitem(unbind(y, 0), 0), getitem(unbind(y, 0), 0)], 0)"),
    ("y0 z1", 0, "stack([getitem(unbind(y, 0), 0), getitem(unbind(z, 0), 1)], 0)"),
    ("y0 z0 a", 0, "stack([getitem(unbind(y, 0), 0), getitem(unbind(z, 0), 0), a], 0)"),
)
JOINED: tuple[tuple[str, int, str], ...] = (
    ("y0 y1 y2 y3 y4 y5", 0, "flatten(y, 0, 1)"),
    ("y0 y1 y2 y3 y4 y5", 1, "contiguous(flatten(movedim(y, 0, 1), 1, 2))"),
    ("a y1 y2", 0, "cat([a, flatten(narrow(y, 0, 1, 2), 0, 1)], 0)"),
    (
        "y0 z0 y1 z1 y2 z2",
        0,
        "flatten(stack([narrow(y, 0, 0, 3), narrow(z, 0, 0, 3)], 1), 0, 2)",
    ),
)


@pytest.mark.parametrize(
    ("function", "names", "dim", "expected"),
    [*((torch.stack, *row) for row in STACKED), *((torch.cat, *row) for row in JOINED)],
)
def test_a_list_of_rows(function: Any, names: str, dim: int, expected: str) -> None:
    outer, olds = around()
    nodes = [olds[name] for name in names.split()]
    graph = nodes[0].graph
    old = graph.call_function(function, (nodes, dim))
    old.meta["example_value"] = function([node.meta["example_value"] for node in nodes], dim)
    outer.copy(old)
    assert spelled(outer.value(old)) == expected
    made = value(outer, outer.value(old))
    assert torch.equal(made, old.meta["example_value"])
    assert made.stride() == old.meta["example_value"].stride()


RUNS: tuple[tuple[str, tuple[str, int, int] | None], ...] = (
    ("y0 y1 y2 y3", ("y", 0, 1)),
    ("y5 y3 y1", ("y", 5, -2)),
    ("y2", None),
    ("y2 y2 y2", None),
    ("y0 y1 y3", None),
    ("y0 y1 z2", None),
    ("a y1 y2", None),
    ("y0 y1 a", None),
)


@pytest.mark.parametrize(("names", "expected"), RUNS)
def test_rows_that_a_later_loop_reads_one_at_each_step(names: str, expected: tuple[str, int, int] | None) -> None:
    outer, olds = around()
    found = outer.run_of(olds[name] for name in names.split())
    assert (found and (found[0].name, *found[1:])) == expected


@pytest.mark.parametrize(
    ("names", "expected"), [("a y0 y1", "cat([unsqueeze(a, 0), narrow(y, 0, 0, 2)], 0)"), ("y0 a y2", None)]
)
def test_values_stacked_for_a_loop_that_carries_nothing(names: str, expected: str | None) -> None:
    outer, olds = around()
    found = outer.stacked([olds[name] for name in names.split()])
    assert (found and spelled(found)) == expected
    if found is not None:
        assert found.meta["example_value"].shape == (3, B, H)


def test_one_row_is_taken_once_and_right_behind_the_loop() -> None:
    outer, olds = around()
    outer.graph.call_function(torch.sin, (outer.env[olds["a"]],))
    rows = [outer.value(olds[name]) for name in ("y1", "y3", "y1")]
    assert rows[0] is rows[2]
    assert [spelled(node) for node in calls(outer.graph)] == [
        "unbind(y, 0)",
        "getitem(unbind(y, 0), 3)",
        "getitem(unbind(y, 0), 1)",
        "sin(a)",
    ]


def without_gradient(outer: Outer, olds: dict[str, fx.Node], names: str) -> None:
    """Say that rows of ``y`` need no gradient, and that its other ones do."""
    for name, node in olds.items():
        needs = name.startswith("y") and name not in names.split()
        node.meta["example_value"] = node.meta["example_value"].clone().requires_grad_(needs)
    whole = outer.emitted[olds["y0"]][0]
    whole.meta["example_value"] = whole.meta["example_value"].clone().requires_grad_()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("y0 y1 y2", "narrow(detach(y), 0, 0, 3)"),
        ("y2 y1", "flip(narrow(detach(y), 0, 1, 2), [0])"),
        ("y0 y2", "stack([getitem(unbind(detach(y), 0), 0), getitem(unbind(detach(y), 0), 2)], 0)"),
        ("y1 y2 y3", "narrow(y, 0, 1, 3)"),
        ("y0 y3", "stack([getitem(unbind(detach(y), 0), 0), getitem(unbind(y, 0), 3)], 0)"),
        ("z0 z1 z2", "narrow(z, 0, 0, 3)"),
    ],
)
def test_rows_that_need_no_gradient_while_others_do(names: str, expected: str) -> None:
    outer, olds = around()
    without_gradient(outer, olds, "y0 y1 y2")
    nodes = [olds[name] for name in names.split()]
    old = nodes[0].graph.call_function(torch.stack, (nodes, 0))
    old.meta["example_value"] = torch.stack([node.meta["example_value"] for node in nodes])
    outer.copy(old)
    assert spelled(outer.value(old)) == expected
    assert sum(node.target == "detach" for node in calls(outer.graph)) == ("detach" in expected)


@pytest.mark.parametrize(("names", "expected"), [("y2 y1 y0", "detach(y)"), ("y2 y3", "y"), ("z0 z1", "z")])
def test_a_later_loop_reads_rows_that_need_no_gradient_without_one(names: str, expected: str) -> None:
    outer, olds = around()
    without_gradient(outer, olds, "y0 y1 y2")
    found = outer.run_of(olds[name] for name in names.split())
    assert found is not None
    assert spelled(found[0]) == expected
    assert found[0].meta["example_value"].requires_grad == (expected == "y")


def test_work_that_does_not_change_is_done_once_in_front_of_the_loop() -> None:
    outer, olds = around()
    graph = olds["a"].graph
    first, again = (graph.call_function(torch.sin, (olds["a"],)) for _ in range(2))
    outer.repeated[again] = first
    assert spelled(outer.hoist(first)) == "sin(a)"
    assert outer.hoist(again) is outer.hoist(first)
