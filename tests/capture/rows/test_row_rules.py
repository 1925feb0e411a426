"""Which operations act on each time step alone: where time is in the result, given where it is in the operands.

Each rule is applied to a small call, and what the fused loop would do for one row is compared with that row of the
result. ``x`` has time in front (T, B, H), ``late`` in the middle (B, T, H); a batch as large as T changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from by_hand import written
from reroll.capture.rows.peel import outer_emitter
from reroll.capture.rows.row_analysis import follow, timed
from reroll.capture.rows.row_rules import Rows
from reroll.graph.editing import name_arguments
from reroll.graph.effects import mark_random

T, B, H = 4, 4, 6
X = torch.linspace(-1, 1, T * B * H).reshape(T, B, H).sin()
OTHERS = {
    "late": X.transpose(0, 1).contiguous().cos(),
    "row": X[1],
    "whole": X.exp(),
    "w": torch.linspace(-1, 1, H * 3).reshape(H, 3),
    "image": torch.linspace(0, 1, T * B * 6 * 6).reshape(T, B, 6, 6).cos(),
    "mean": torch.zeros(B),
}
Function = Callable[[Any], Any]
"""A call on the namespace of inputs; what it calls last is what the rule is for."""


class Inputs:
    """The inputs by their names."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.x, self.late, self.row, self.whole, self.w, self.image, self.mean = values


def rows(dim: int = 0, length: int = T, inner: int = 1, shift: int = 0, first: int = 0, last: int = T) -> Rows:
    return Rows(dim, inner, length, shift, first, last)


TIME = {"x": 0, "late": 1, "image": 0}


def followed(function: Function, made: tuple[int, int] = (0, T)) -> tuple[fx.GraphModule, dict[fx.Node, Rows | str]]:
    """The graph of a call, and what follows from the inputs with time, whose rows ``made`` the loop makes."""
    inputs = (X, *OTHERS.values())

    def call(x: Any, late: Any, row: Any, whole: Any, w: Any, image: Any, mean: Any) -> Any:
        return function(Inputs((x, late, row, whole, w, image, mean)))

    module = written(call, *inputs)
    name_arguments(module.graph)
    mark_random(module, module.graph)
    given = module.graph.find_nodes(op="placeholder")
    found: dict[fx.Node, Rows | str] = {
        node: rows(TIME[node.name], first=made[0], last=made[1]) for node in given if node.name in TIME
    }
    return module, follow(module.graph, given[0], found)


def result(module: fx.GraphModule) -> fx.Node:
    node = module.graph.output_node().args[0]
    assert isinstance(node, fx.Node)
    return node


ROWS: dict[str, tuple[Function, Rows]] = {
    "entry by entry": (lambda i: torch.tanh(i.x), rows()),
    "entry by entry, by a tag of torch": (lambda i: torch.nan_to_num(torch.atan(i.late)), rows(1)),
    "entry by entry, by another name": (lambda i: torch.multiply(i.x, i.row), rows()),
    "made of what goes entry by entry": (lambda i: functional.softsign(i.x), rows()),
    "the larger of two": (lambda i: torch.max(i.x, i.whole), rows()),
    "two with time": (lambda i: i.x * (i.x + 1), rows()),
    "one row for all": (lambda i: i.x + i.row, rows()),
    "a row per step from outside": (lambda i: i.x + i.whole, rows()),
    "broadcast from the left": (lambda i: i.late + i.x.sum((1, 2)).unsqueeze(-1), rows(1)),
    "a slope for each channel": (lambda i: functional.prelu(i.x, i.mean + 0.5), rows()),
    "one slope": (lambda i: functional.prelu(i.late, i.mean[:1] + 0.5), rows(1)),
    "linear": (lambda i: functional.linear(i.x, i.w.t()), rows()),
    "a lookup": (lambda i: functional.embedding((i.x > 0).to(torch.int64), i.w), rows()),
    "linear, time in the middle": (lambda i: functional.linear(i.late, i.w.t()), rows(1)),
    "matmul": (lambda i: torch.matmul(i.x, i.w), rows()),
    "layer norm": (lambda i: functional.layer_norm(i.x, (B, H)), rows()),
    "batch norm that counts nothing": (lambda i: functional.batch_norm(i.x, i.mean, i.mean + 1), rows()),
    "sum, time stays in front": (lambda i: i.x.sum(-1), rows()),
    "sum, time moves to the front": (lambda i: i.late.sum(0), rows(0)),
    "sum that keeps its dimension": (lambda i: i.late.sum(0, keepdim=True), rows(1)),
    "softmax": (lambda i: torch.softmax(i.x, -1), rows()),
    "select": (lambda i: torch.select(i.late, 0, 1), rows(0)),
    "glu": (lambda i: functional.glu(i.x), rows()),
    "flip": (lambda i: torch.flip(i.x, [1, 2]), rows()),
    "flip, dimensions one by one": (lambda i: i.x.flip(2, 1), rows()),
    "expand as another": (lambda i: i.x[:, :1].expand_as(i.whole), rows()),
    "broadcast": (lambda i: torch.broadcast_to(i.x[:, :1], (2, T, B, H)), rows(1)),
    "axes of two names": (lambda i: torch.swapdims(i.x, 0, 1), rows(1)),
    "a cat of another name": (lambda i: torch.concat([i.x, i.x], 2), rows()),
    "a view like another": (lambda i: i.x.view_as(i.whole), rows()),
    "to whole numbers": (lambda i: i.x.short(), rows()),
    "transpose": (lambda i: i.x.transpose(0, 2), rows(2)),
    "permute": (lambda i: i.x.permute(1, 2, 0), rows(2)),
    "a view of what is behind": (lambda i: i.x.reshape(T, -1), rows()),
    "time and batch in one": (lambda i: i.x.flatten(0, 1), rows(0, inner=B)),
    "time and batch apart again": (lambda i: i.x.flatten(0, 1).unflatten(0, (T, B)), rows()),
    "unsqueeze": (lambda i: i.x.unsqueeze(0), rows(1)),
    "expand": (lambda i: i.x.unsqueeze(1).expand(T, 2, B, H), rows()),
    "convolution": (lambda i: functional.conv2d(i.image, torch.ones(2, B, 3, 3)), rows()),
    "pooling": (lambda i: functional.max_pool2d(i.image, 2), rows()),
    "narrow, not over time": (lambda i: torch.narrow(i.x, 2, 1, 2), rows()),
    "narrow over time": (lambda i: torch.narrow(i.x, 0, 1, 2), rows(length=2, shift=-1, last=2)),
    "a slice of time": (lambda i: i.x[1:], rows(length=T - 1, shift=-1, last=T - 1)),
    "an index that leaves time alone": (lambda i: i.late[0, :, 2], rows(0)),
    "a new dimension": (lambda i: i.x[None, :, 1:], rows(1)),
    "cat, not over time": (lambda i: torch.cat([i.x, i.x], 2), rows()),
    "cat over time": (lambda i: torch.cat([i.row.unsqueeze(0), i.x]), rows(length=5, shift=1, first=1, last=5)),
    "stack in front of time": (lambda i: torch.stack([i.x, i.x]), rows(1)),
    "stack, as numpy spells it": (lambda i: torch.stack([i.x, i.x], axis=2), rows()),  # type: ignore[call-arg]
    "sum, as numpy spells it": (lambda i: i.x.sum(axis=-1, keepdims=True), rows()),
    "stack behind time": (lambda i: torch.stack([i.x, i.whole], 1), rows()),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_result_is_made_of_rows_of_the_operands(name: str) -> None:
    function, expected = ROWS[name]
    module, found = followed(function)
    end, all_rows = result(module), timed(found)
    at = all_rows[end]
    assert (at.dim, at.inner, at.length, at.shift, at.first, at.last) == (
        expected.dim,
        expected.inner,
        expected.length,
        expected.shift,
        expected.first,
        expected.last,
    )
    whole: Tensor = end.meta["example_value"]
    around = outer_emitter(module.graph, all_rows)
    with module.graph.inserting_before(module.graph.output_node()):
        made = tuple(around.emit(end, r) for r in range(at.length))
    module.graph.output_node().args = (made,)
    module.recompile()
    for r, row in enumerate(module(X, *OTHERS.values())):
        torch.testing.assert_close(row, whole.narrow(at.dim, r * at.inner, at.inner))


def test_pieces_of_a_value_have_its_rows() -> None:
    module, found = followed(lambda i: torch.chunk(i.x, 2, -1)[1])
    assert timed(found)[result(module)] == rows()


def test_only_the_rows_that_all_operands_have_are_made_in_the_loop() -> None:
    module, found = followed(lambda i: i.x[1:] + i.x[1:], made=(0, 3))
    at = timed(found)[result(module)]
    assert (at.length, at.first, at.last) == (3, 0, 2)


ALONE = "is not known to act on each time step alone"
REFUSED: dict[str, tuple[Function, str]] = {
    "a lookup that counts": (
        lambda i: functional.embedding((i.x > 0).to(torch.int64), i.w, scale_grad_by_freq=True),
        ALONE,
    ),
    "a lookup in a large table": (lambda i: functional.embedding((i.x > 0).long(), i.w.repeat(400, 1)), ALONE),
    "a lookup, the table first": (lambda i: torch.embedding(i.x[:, 0], torch.tensor([3, 0, 1, 2])), ALONE),
    "a flip of time, dimensions one by one": (lambda i: i.x.flip(1, 0), ALONE),
    "other bits, by keyword": (lambda i: i.x.view(dtype=torch.int32), ALONE),
    "a slope for each step": (lambda i: functional.prelu(i.late, i.mean + 0.5), ALONE),
    "no rule": (lambda i: torch.sort(i.x), ALONE),
    "a sum over time": (lambda i: i.x.sum(0), ALONE),
    "a sum over all": (lambda i: i.x.sum(), ALONE),
    "a softmax over time": (lambda i: torch.softmax(i.x, 0), ALONE),
    "time in different places": (lambda i: i.x + i.late, ALONE),
    "time off by one": (lambda i: i.x[1:] + i.x[:-1], ALONE),
    "a product over time": (lambda i: torch.matmul(i.x.permute(1, 2, 0), i.w[:T]), ALONE),
    "time as a weight": (lambda i: torch.matmul(i.w.t(), i.late.transpose(1, 2)), ALONE),
    "a product with a batch of matrices": (lambda i: torch.matmul(i.x, i.whole.transpose(1, 2)), ALONE),
    "layer norm over time": (lambda i: functional.layer_norm(i.late, (T, H)), ALONE),
    "batch norm of the batch": (
        lambda i: functional.batch_norm(i.x, None, None, training=True),
        "takes its statistics over all time steps at once",
    ),
    "time as channels": (
        lambda i: functional.batch_norm(i.late, i.mean, i.mean + 1),
        "takes its statistics over all time steps at once",
    ),
    "time as an image": (lambda i: functional.max_pool2d(i.image.transpose(0, 2), 2), ALONE),
    "time merged behind batch": (lambda i: i.late.flatten(0, 1), ALONE),
    "one step": (lambda i: torch.select(i.x, 0, 1), "it needs single steps of the first"),
    "all steps apart": (lambda i: torch.unbind(i.x), "it needs single steps of the first"),
    "every second step": (lambda i: i.x[::2], ALONE),
    "an index of tensors": (lambda i: i.x[torch.tensor([0, 1])], ALONE),
    "a window that is a tensor's": (lambda i: torch.narrow(i.x, 0, torch.tensor(1), 2), ALONE),
    "part of time with batch": (lambda i: i.x.flatten(0, 1)[1:], ALONE),
    "two with time, one behind the other": (lambda i: torch.cat([i.x, i.x]), ALONE),
    "cat of time in different places": (lambda i: torch.cat([i.x, i.late], 2), ALONE),
    "other bits": (lambda i: i.x.view(torch.int32), ALONE),
    "random numbers": (
        lambda i: functional.dropout(i.x, 0.5, True),
        "draws the random numbers of all time steps at once",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_the_steps(name: str) -> None:
    function, reason = REFUSED[name]
    module, found = followed(function)
    why = found[result(module)]
    assert isinstance(why, str)
    assert reason in why
