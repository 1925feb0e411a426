"""Blocks over depth, each with weights of its own, are steps: found, and trained as eager trains them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from deep_networks import DEEP, WIDTH, Layer, Stack, layers
from reroll.errors import OptionError, RerollWarning
from training_step import assert_alike, trained

OPTIONS: dict[str, Any] = {"lowering": "eager"}


def assert_trained_alike(model: nn.Module, x_BC: Tensor, options: dict[str, Any]) -> Any:
    """Compare with eager to 1e-12; the report."""
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="reroll", options=options)
    assert_alike(trained(run, model, x_BC), trained(twin, twin, x_BC), 1e-12)
    return reroll.explain(run, x_BC)


@pytest.mark.variants(4)
@pytest.mark.parametrize("options", [{}, {"schedule": "standard", "segment": 1}], ids=["auto", "standard"])
@pytest.mark.parametrize("name", DEEP)
def test_blocks_are_rolled_and_trained_as_in_eager(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    make, steps = DEEP[name]
    report = assert_trained_alike(make().double(), torch.randn(5, WIDTH).double(), OPTIONS | options)
    assert [loop.recurrence.steps for loop in report.loops] == steps


@pytest.mark.parametrize("schedule", ["store_all", "double", "revolve"])
def test_schedules_go_over_depth(schedule: str) -> None:
    torch.manual_seed(0)
    model = Stack(*layers(p=0.2)).double()
    options = OPTIONS | {"schedule": schedule, "segment": 1, "verify": True}
    report = assert_trained_alike(model, torch.randn(5, WIDTH).double(), options)
    assert report.loops[0].choice.schedule == schedule


def test_a_frozen_prefix_is_not_reversed() -> None:
    torch.manual_seed(0)
    make, _ = DEEP["the first frozen"]
    model = torch.compile(make(), backend="reroll", options=OPTIONS)
    first, second = reroll.explain(model, torch.randn(5, WIDTH)).loops
    assert first.needs.grads == first.saved == 0
    assert second.needs.grads > 0


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_blocks_are_left_alone_where_they_are_not_wanted_or_make_little() -> None:
    deep = torch.compile(Stack(*layers()), backend="reroll", options=OPTIONS | {"depth": False})
    assert not reroll.explain(deep, torch.randn(5, WIDTH)).loops

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.wide = Stack(*layers()), nn.Linear(3, 4000)

        def forward(self, x_BC: Tensor) -> Tensor:
            y_BC: Tensor = self.wide(self.stack(x_BC)).tanh()
            return y_BC

    report = reroll.explain(torch.compile(Wide(), backend="reroll", options=OPTIONS), torch.randn(5, WIDTH))
    assert not report.loops
    assert "8 equal blocks begin at" in report.reason
    assert "does not pay" in report.reason


def test_tiny_blocks_share_a_segment_and_large_ones_do_not() -> None:
    for batch, segment in ((2, 4), (400, 1)):
        model = torch.compile(Stack(*layers()), backend="reroll", options=OPTIONS)
        (loop,) = reroll.explain(model, torch.randn(batch, WIDTH)).loops
        assert loop.choice.segment == segment


def test_a_loop_over_time_goes_first() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.stack = nn.Linear(WIDTH, WIDTH), Stack(*layers())

        def forward(self, x_TBC: Tensor) -> Tensor:
            h_BC = torch.zeros_like(x_TBC[0])
            for t in range(x_TBC.shape[0]):
                h_BC = torch.tanh(self.cell(x_TBC[t] + h_BC))
            y_BC: Tensor = self.stack(h_BC)
            return y_BC

    torch.manual_seed(0)
    report = assert_trained_alike(Recurrent().double(), torch.randn(12, 3, WIDTH).double(), OPTIONS)
    assert [(loop.recurrence.steps, loop.recurrence.blocks) for loop in report.loops] == [(12, False), (8, True)]


def test_one_block_of_another_kind_is_never_papered_over() -> None:
    for odd in (Layer(p=0.5), Layer(scale=2.0), Layer(norm=nn.BatchNorm1d), Layer(torch.relu)):
        torch.manual_seed(0)
        model = Stack(*layers(4), odd, *layers(4)).double()
        assert_trained_alike(model, torch.randn(5, WIDTH).double(), OPTIONS)
        torch.compiler.reset()


def test_reroll_compile_without_time_rolls_blocks() -> None:
    torch.manual_seed(0)
    model, x_BC = Stack(*layers()).double(), torch.randn(5, WIDTH).double()
    run = reroll.compile(model, **OPTIONS)
    assert reroll.check(run, x_BC, measure=False, strict=True).equal
    assert [loop.recurrence.steps for loop in reroll.explain(run, x_BC).loops] == [8]

    @reroll.compile(**OPTIONS)  # type: ignore[untyped-decorator]
    def deep(x_BC: Tensor) -> Tensor:
        y_BC: Tensor = model(x_BC)
        return y_BC

    assert [loop.recurrence.steps for loop in reroll.explain(deep, x_BC).loops] == [8]
    with pytest.raises(OptionError, match="cannot be called"):
        reroll.compile(3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="memory_bugdet"):
        reroll.compile(model, memory_bugdet=3)  # type: ignore[call-overload]


def test_where_nothing_repeats_it_says_so() -> None:
    model: Any = torch.compile(Stack(Layer(), Layer(torch.tanh)), backend="reroll", options=OPTIONS)
    with pytest.warns(RerollWarning, match=r"most of them at File .*deep_networks\.py.*; no sequence of op"):
        model(torch.randn(5, WIDTH))


def test_the_report_speaks_of_blocks_by_their_names() -> None:
    two = Stack(*(Layer(F.gelu if n % 2 else torch.tanh) for n in range(8)))
    for model, modules in ((Stack(*layers(5)), [f"blocks.{n}" for n in range(5)]), (two, ["blocks"] * 4)):
        report = reroll.explain(reroll.compile(model, **OPTIONS), torch.randn(5, WIDTH))
        assert list(report.loops[0].recurrence.modules) == modules
    text = str(reroll.explain(reroll.compile(Stack(*layers(12)), **OPTIONS), torch.randn(5, WIDTH)))
    assert "12 blocks of" in text
    assert "blocks.0, blocks.1, ..., blocks.11" in text
    assert "a block" in text
    assert "blocks re-run" in text


@pytest.mark.variants(4)
@pytest.mark.parametrize("schedule", ["store_all", "standard", "revolve"])
@pytest.mark.parametrize("depth", [0, 3, 7])
def test_blocks_that_the_loss_does_not_reach_have_no_gradients(depth: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = Stack(*layers(8), hidden=True).double()
    twin, x_BC = copy.deepcopy(model), torch.randn(5, WIDTH).double()
    run = torch.compile(model, backend="reroll", options=OPTIONS | {"schedule": schedule, "segment": 1})
    for each in (run, twin):
        each(x_BC)[1][depth].square().sum().backward()
    found, expected = ([p.grad for p in each.parameters()] for each in (model, twin))
    assert [grad is None for grad in found] == [grad is None for grad in expected]
    assert [grad is None for grad in expected].count(True) == 6 * (7 - depth) + 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_blocks_behind_a_state_that_nobody_reads_have_no_gradients() -> None:
    """The last block is cut off, and the loop found begins within a block: no gradient comes to what it ends with."""

    class Cut(Stack):
        def forward(self, x_BC: Tensor) -> Tensor:
            *blocks, last = self.blocks
            for block in blocks:
                x_BC = block(x_BC)
            y_BC: Tensor = last(x_BC)
            return x_BC + y_BC.detach()

    torch.manual_seed(0)
    assert_trained_alike(Cut(*layers(6)).double(), torch.randn(5, WIDTH).double(), OPTIONS)
