"""How many steps are compiled together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.planning.options import Options
from reroll.planning.segments import any_lengths, lengths_of, segment_length, usual_segment
from reroll.recurrence import Items, Recurrence


class Small(nn.Module):
    """Two coupled tanh populations; the second looks at the first one step late."""

    def __init__(self, neurons: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 + neurons, neurons), nn.Linear(neurons, neurons)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = g_BH = x_TBI.new_zeros(x_TBI.shape[1], self.second.in_features)
        for t in range(x_TBI.shape[0]):
            later = torch.tanh(self.second(h_BH) - 0.1 * g_BH)
            h_BH, g_BH = torch.tanh(self.first(torch.cat([x_TBI[t], h_BH], 1))), later
        return g_BH


class Cell(nn.Module):
    """One operation that stands for many."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 32)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 32)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
        return h_BH


@cache
def recurrence(steps: int, neurons: int) -> Recurrence:
    """That of ``Small``, or with 0 neurons of ``Cell``."""
    model = Small(neurons) if neurons else Cell()
    compiled = reroll.compile(model, lowering="eager", segment=1)
    return reroll.explain(compiled, torch.randn(steps, 2, 3)).loops[0].recurrence


def segments(steps: int, neurons: int, **options: Any) -> tuple[int, ...]:
    """The lengths that inductor would be given."""
    asked = Options(lowering="inductor", **options)
    return any_lengths(usual_segment(recurrence(steps, neurons), asked), asked)


def test_segments_are_longer_where_a_step_takes_less_time_than_a_call() -> None:
    assert segments(600, 6) == (32, 8, 1)
    assert segments(600, 120) == (16, 8, 1)
    assert segments(600, 1000) == (8, 1)
    assert segments(600, 0) == (16, 8, 1)


def test_few_steps_and_little_memory_are_not_worth_longer_segments() -> None:
    assert segments(100, 6) == (8, 1)
    assert segments(600, 6, schedule="double") == (8, 1)


class Frames(nn.Module):
    """A convolution of frames, which its state fades into."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, kernel, padding=kernel // 2)

    def forward(self, x_TBCHW: Tensor) -> Tensor:
        v = torch.zeros(())
        for frame in x_TBCHW.unbind():
            v = torch.tanh(self.conv(frame) + 0.5 * v)
        return v


@pytest.mark.parametrize(
    ("batch", "side", "length"), [(2, 16, 8), pytest.param(16, 64, 4, id="large")], ids=lambda value: str(value)
)
@pytest.mark.parametrize("schedule", ["auto", "double"])
def test_segments_of_steps_that_make_much_with_few_weights_are_short(
    batch: int, side: int, length: int, schedule: str
) -> None:
    compiled = reroll.compile(Frames(), lowering="eager", segment=1)
    found = reroll.explain(compiled, torch.randn(12, batch, 1, side, side)).loops[0].recurrence
    assert usual_segment(found, Options(lowering="inductor", schedule=schedule)) == length


def test_steps_with_large_weights_keep_their_length() -> None:
    """Their products are brought together over the steps of a segment."""
    found = recurrence(16, 1_200)
    large = replace(found, examples=tuple(each.new_empty((0,)) for each in found.examples))
    wide = [node for node in found.step.graph.nodes if node.op.startswith("call")]
    before = [node.meta["example_value"] for node in wide]
    try:
        for node in wide:
            node.meta["example_value"] = torch.empty(1 << 20)
        options = Options(lowering="inductor")
        assert usual_segment(found, options) == 8, "4 MB for each operation, and weights of 11 MB"
        assert usual_segment(large, options) == 4
    finally:
        for node, value in zip(wide, before, strict=True):
            node.meta["example_value"] = value


def test_a_card_has_longer_segments() -> None:
    """A call takes a card longer than a CPU."""
    found, options = recurrence(16, 0), Options(lowering="inductor")
    there = replace(found, examples=tuple(each.to("meta") for each in found.examples))
    assert (usual_segment(found, options), usual_segment(there, options)) == (6, 8)


class Period(Cell):
    """A step of 20 cells: one in 20 does something else."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 32)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
            if t % 20 == 0:
                h_BH = h_BH * 0.5
        return h_BH


@pytest.mark.parametrize("schedule", ["auto", pytest.param("double", marks=pytest.mark.campaign)])
def test_steps_of_hundreds_of_operations_are_compiled_a_few_at_a_time(schedule: str) -> None:
    compiled = reroll.compile(Period(), lowering="eager", segment=1)
    found = reroll.explain(compiled, torch.randn(160, 2, 3)).loops[0].recurrence
    assert found.steps == 8
    assert usual_segment(found, Options(lowering="inductor", schedule=schedule)) == 4


def test_segments_without_compilation_are_short() -> None:
    compiled = reroll.compile(Small(), lowering="eager")
    assert reroll.explain(compiled, torch.randn(600, 2, 3)).loops[0].choice.segment == 4


@pytest.mark.inductor
@pytest.mark.campaign
def test_gradients_are_those_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(555, 2, 3, dtype=torch.float64)
    compiled = reroll.compile(model, lowering="inductor", verify=True)
    for steps in (555, 532):
        expected = torch.autograd.grad(model(x[:steps]).square().sum(), list(model.parameters()))
        found = torch.autograd.grad(compiled(x[:steps]).square().sum(), list(model.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert reroll.explain(compiled, x).loops[0].choice.segment == 32


@pytest.mark.parametrize(("steps", "length"), [(99, 9), (1000, 8), (101, 8), (42, 7), (6, 8), (8, 8)])
def test_segments_leave_no_rest_where_they_can(steps: int, length: int) -> None:
    found = replace(recurrence(9, 6), segment=0, steps=steps)
    options = Options(lowering="inductor", schedule="double")  # so that many small steps change nothing
    assert segment_length(found, options) == length
    assert segment_length(replace(found, segment=5), options) == 5
    rest = () if steps % length == 0 else (1,)
    assert lengths_of(found, length, options) == (length, *rest)


@pytest.mark.inductor
def test_segments_stay_as_long_as_the_first_number_of_steps_made_them() -> None:
    compiled = reroll.compile(Small())
    seen = [reroll.explain(compiled, torch.randn(steps, 2, 3)).loops[0] for steps in (50, 63, 65)]
    assert seen[0].recurrence.steps == 49
    assert {loop.choice.segment for loop in seen} == {7}


@pytest.mark.parametrize("asked", [{}, {"segment": 8}])
def test_segments_for_any_number_of_steps_are_no_longer_than_a_list_that_they_read(asked: dict[str, Any]) -> None:
    plain = replace(recurrence(9, 6), segment=0)
    reading = replace(plain, steps=3, xs=(Items((2, 3, 4)),))
    options = Options(lowering="eager", **asked)
    assert plain.any_length
    assert segment_length(plain, options) == asked.get("segment", 4)
    assert segment_length(reading, options) == 3
