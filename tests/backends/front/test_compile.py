"""``reroll.compile`` at every length: gradients as in eager, compiled once, guarded; or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
import reroll.backends.construct.kernels as build
from agreement import differences, results
from length_networks import (
    DOUBLE,
    EAGER,
    H,
    I,
    Net,
    agree,
    backwards,
    detach_late,
    detached,
    dropped,
    every_other,
    flattened,
    interleaved,
    last,
    late,
    late_rows,
    later_scale,
    masked,
    other_surrogate,
    over_steps,
    positions,
    rows,
    stacked,
    states,
    stuck_index,
    time_numbers,
    turned,
)
from reroll.backends.dynamo.entry import rolled
from reroll.backends.front.full import at_length
from reroll.backends.front.recorded import Recorded

pytestmark = pytest.mark.usefixtures("double_precision")


BODIES = (last, stacked, rows, over_steps, flattened, positions, time_numbers, dropped, backwards, every_other)


@pytest.mark.variants(4)
@pytest.mark.parametrize("body", [*BODIES, detached, interleaved, late])
def test_every_length_agrees_with_eager(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    net = Net(body)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **DOUBLE)
    for steps in (37, 14, 50):
        agree(net, run, twin, torch.randn(steps, 3, I))


def test_thirty_lengths_are_traced_and_compiled_once() -> None:
    net = Net(stacked)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    kernels = mock.Mock(wraps=build.compile_kernels)
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(build, "compile_kernels", kernels):
        for steps in (40, *range(3, 15), *range(21, 300, 20), 64):
            agree(net, run, twin, torch.randn(steps, 2, I))
    assert kernels.call_count <= 2  # the loop, and the row-wise readout where it is a loop of its own
    assert not torch._dynamo.utils.counters["stats"]


def test_many_lengths_in_any_order_are_recorded_and_planned_once() -> None:
    torch.manual_seed(0)
    net = Net(last)
    fast: Any = reroll.compile(net, **EAGER)
    lengths = torch.randperm(150) + 12
    with (
        mock.patch.object(Recorded, "record", autospec=True, side_effect=Recorded.record) as recorded,
        mock.patch.object(at_length, "rolled", wraps=rolled) as planned,
    ):
        for steps in (*lengths.tolist(), *lengths.flip(0).tolist(), *lengths[torch.randperm(150)].tolist()):
            fast(torch.randn(steps, 2, I)).sum().backward()
    assert planned.call_count == 150
    assert recorded.call_count == 300  # looked at again at the second call of each
    assert len(fast.reroll_caller.at_length.recorded.recordings) == 150


def test_lengths_are_independent_of_their_order() -> None:
    net = Net(rows)
    for order in ((1, 9, 30), (30, 9, 1), (8, 11, 9)):
        twin = copy.deepcopy(net)
        run = reroll.compile(twin, **EAGER)
        for steps in order:
            agree(net, run, twin, torch.randn(steps, 2, I))


def test_lists_and_numbers_come_at_the_full_length() -> None:
    net = Net(rows)
    x_TBI = torch.randn(33, 2, I)
    found = reroll.compile(net, **EAGER)(x_TBI)
    assert len(found["all"]) == len(found["pairs"]) == found["steps"] == 33
    assert found["x"] is x_TBI
    assert isinstance(found["some"], tuple)
    assert len(found["some"][1]) == 2


@pytest.mark.variants(4)
@pytest.mark.parametrize("change", ["batch", "dtype", "mode", "attribute", "requires_grad", "no_grad"])
def test_all_but_the_length_is_guarded(change: str) -> None:
    net = Net(lambda net, x: net.drop(last(net, x)))
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    agree(net, run, twin, torch.randn(20, 2, I))
    batch = 5 if change == "batch" else 2
    if change == "dtype":
        net, twin = net.float(), twin.float()
    if change == "mode":
        net.eval()
        run.eval()
        assert not twin.training
    if change == "attribute":
        net.scale = twin.scale = 3.0
    if change == "requires_grad":
        for each in (net, twin):
            each.cell.weight_hh.requires_grad_(False)
    x_TBI = torch.randn(25, batch, I, dtype=torch.float32 if change == "dtype" else None)
    if change == "no_grad":
        with torch.no_grad():
            torch.manual_seed(1)
            expected = net(x_TBI)
            torch.manual_seed(1)
            assert torch.allclose(run(x_TBI), expected)
        return
    different = differences(
        results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-5 if change == "dtype" else 1e-11
    )
    assert not different


def test_nested_arguments_by_name() -> None:
    net = Net(masked)

    def call(batch: dict[str, Any], h_BH: Tensor, absent: Tensor | None = None, *, gain: float = 1.0) -> Any:
        return masked(net, batch, h_BH, gain=gain)

    run = reroll.compile(call, **EAGER)
    for steps in (H, 31, 3, 12):
        batch = {"x": torch.randn(H, steps, I), "rest": (torch.rand(steps, H), torch.arange(H))}
        expected = net(batch, torch.ones(H, H), gain=0.5)
        found = run(batch, torch.ones(H, H), gain=0.5)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def test_batch_first_sequences_that_are_views() -> None:
    net = Net(lambda net, x_BTI: states(net, x_BTI.transpose(0, 1))[-1])
    run = reroll.compile(net, **DOUBLE)
    for x_BTI in (torch.randn(3, 30, I), torch.randn(30, 3, I).transpose(0, 1), torch.randn(3, 60, 2 * I)[:, ::2, :I]):
        assert torch.allclose(run(x_BTI), net(x_BTI), atol=1e-12)


def test_the_model_is_as_if_it_had_run_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls, self.log = nn.BatchNorm1d(I), 0, {"h": torch.zeros(2, I)}

        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BI = self.log["h"]
            for t in range(x_TBI.shape[0]):
                h_BI = torch.tanh(nn.functional.dropout(self.norm(x_TBI[t] + h_BI), 0.2))
            self.log["h"] = h_BI.detach()
            return h_BI

    net = Counting()
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (20, 31):
        agree(net, run, twin, torch.randn(steps, 2, I))  # type: ignore[arg-type]
        assert torch.allclose(net.log["h"], twin.log["h"], atol=1e-12)
        assert torch.allclose(net.norm.running_var, twin.norm.running_var, atol=1e-12)  # type: ignore[arg-type]
        assert net.norm.num_batches_tracked == twin.norm.num_batches_tracked


@pytest.mark.parametrize("body", [detach_late, stuck_index])
def test_what_short_traces_do_not_show_is_right(
    body: Callable[..., Any],
) -> None:
    net = Net(body)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (38, 60, 85, 25):
        agree(net, run, twin, torch.randn(steps, 2, I))


@pytest.mark.parametrize("body", [other_surrogate, late_rows, turned, later_scale])
def test_what_longer_traces_show_is_right(body: Callable[..., Any]) -> None:
    net = Net(body)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (40, 64, 45):
        agree(net, run, twin, torch.randn(steps, 2, I))


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("given", [False, True])
def test_branches_that_read_a_parameter(given: bool) -> None:
    class Branching(nn.Module):
        def __init__(self, given: bool) -> None:
            super().__init__()
            self.cell, self.scale, self.given = nn.Linear(I, I), nn.Parameter(torch.tensor(0.9)), given

        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BI = x_TBI[0]
            for t in range(x_TBI.shape[0]):
                u_BI = torch.tanh(self.cell(h_BI) + x_TBI[t])
                if self.given:
                    h_BI = torch.cond(
                        u_BI.sum() > 0, lambda u, s: u.clone(), lambda u, s: u.sigmoid() * s, (u_BI, self.scale)
                    )
                else:
                    h_BI = torch.cond(u_BI.sum() > 0, lambda u: u.clone(), lambda u: u.sigmoid() * self.scale, (u_BI,))
            return h_BI

    net: Any = Branching(given)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (12, 20, 12):
        agree(net, run, twin, torch.randn(steps, 2, I))


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_serves_every_length() -> None:
    net = Net(stacked)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, verify=True)
    for steps in (60, 7, 33, 129):
        x_TBI = torch.randn(steps, 2, I)
        assert not differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-9)
