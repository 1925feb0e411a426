"""torch.scan, and steps that torch.compiler.nested_compile_region marks: loops and steps that Dynamo shows as such.

The reference of a scan is a plain Python loop: eager torch.scan on 2.11 has wrong gradients for some initial values.
T time, B batch, I inputs, H hidden values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.utils._pytree import tree_map

from agreement import compare, sizes
from pairs import spike
from reroll.graph.lines import where

T, B, I, H = 9, 3, 5, 7  # noqa: E741
STORE_ALL: dict[str, Any] = {"schedule": "store_all"}
STANDARD: dict[str, Any] = {"schedule": "standard"}
DOUBLE: dict[str, Any] = {"schedule": "double", "chunk": 4, "slots": 2, "segment": 2, "remote": "disk", "verify": True}
SCHEDULES = pytest.mark.parametrize("options", [STORE_ALL, STANDARD, DOUBLE], ids=["store_all", "standard", "double"])


pytestmark = pytest.mark.usefixtures("double_precision", "rnn_layers", "shared_walks")


class Model(nn.Module):
    """Parts that the networks share, around one of them."""

    def __init__(self, network: Callable[..., Any]) -> None:
        super().__init__()
        self.network = network
        self.l, self.r, self.bn, self.gru = nn.Linear(I, H), nn.Linear(H, H), nn.BatchNorm1d(H), nn.GRU(I, H)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(H))

    def forward(self, *inputs: Any) -> Any:
        return self.network(self, *inputs)


def check(network: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[tuple[int, int], ...]:
    """Compare with plain eager autograd; give the recurrences as (steps, carries)."""
    different, made = compare(Model(network), inputs, **{**STANDARD, **options})
    assert not different
    return sizes(made)


def scanned(step: Callable[..., Any], carry: Any, xs: Tensor, reverse: bool = False, dim: int = 0) -> Any:
    """torch.scan while it is compiled, and a plain loop that means the same in the eager reference."""
    if torch.compiler.is_compiling():
        return scan(step, carry, xs, reverse=reverse, dim=dim)
    rows = []
    for x in reversed(xs.unbind(dim)) if reverse else xs.unbind(dim):
        carry, y = step(carry, x)
        rows.append(y)
    rows = rows[::-1] if reverse else rows
    at = dim if torch.__version__ >= "2.13" else 0
    return carry, tree_map(lambda *column: torch.stack(column, at), *rows)


def cell(s: Model, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(s.l(x) + s.r(h))
    return h.clone(), h.sin()


def scan_from_zeros(s: Model, x: Tensor) -> Any:
    return scanned(lambda h, row: cell(s, h, row), x.new_zeros(B, H), x)


def scan_reversed(s: Model, x: Tensor, h: Tensor) -> Any:
    return scanned(lambda h, row: cell(s, h, row), h, x, reverse=True)


def scan_last(s: Model, x: Tensor, h: Tensor) -> Any:
    return scanned(lambda h, row: cell(s, h, row), h, x)[0]


def scan_other_dimension(s: Model, x: Tensor, h: Tensor) -> Any:
    def step(carry: Any, row: Tensor) -> Any:
        total, h = carry
        h, y = cell(s, h, row)
        return (total + y, h), {"sum": row.sum(1), "y": y}

    return scanned(step, (h * 2, h), x.transpose(0, 1), dim=1)


def scan_spikes(s: Model, x: Tensor) -> Any:
    def step(carry: Any, row: Tensor) -> Any:
        v, z = carry
        v = 0.9 * v * (1 - z) + s.l(row) + s.r(z)
        z = spike(v - 0.3)
        return (v.clone(), z.clone()), z * 1

    v = x.new_zeros(B, H)
    return scanned(step, (v, v.clone()), x)


def scan_dropout(s: Model, x: Tensor) -> Any:
    def step(h: Tensor, row: Tensor) -> Any:
        h = torch.tanh(s.l(row) + s.r(h))
        return h.clone(), nn.functional.dropout(h, 0.3)

    return scanned(step, x.new_zeros(B, H), x)


def scan_dropout_that_nobody_reads(s: Model, x: Tensor) -> Any:
    return scan_dropout(s, x)[0]


def scan_of_one_step_in_a_loop(s: Model, x: Tensor) -> Any:
    h, rows = x.new_zeros(B, H), []
    for t in range(x.shape[0]):
        h, y = scanned(lambda h, row: cell(s, h, row), h, x[t : t + 1])
        rows.append(y)
    return torch.cat(rows), h


def scan_around_gru(s: Model, x: Tensor) -> Any:
    def step(h: Tensor, row: Tensor) -> Any:
        y, h = s.gru(torch.stack([row, row * 2]), h)
        return h.clone(), y.sum(0)

    return scanned(step, x.new_zeros(1, B, H), x)


SCANS = {
    scan_from_zeros: (9, 1),
    scan_reversed: (9, 1),
    scan_last: (9, 1),
    scan_other_dimension: (9, 2),
    scan_spikes: (9, 2),
    scan_dropout: (9, 1),
    scan_dropout_that_nobody_reads: (9, 1),
    scan_of_one_step_in_a_loop: (9, 1),
    scan_around_gru: (9, 1),
}


def inputs_of(network: Callable[..., Any]) -> tuple[Tensor, ...]:
    given = network in (scan_reversed, scan_last, scan_other_dimension)
    return (torch.randn(T, B, I), torch.randn(B, H)) if given else (torch.randn(T, B, I),)


@pytest.mark.variants(4)
@pytest.mark.parametrize("network", SCANS, ids=lambda network: network.__name__)
def test_scan(network: Callable[..., Any]) -> None:
    assert check(network, *inputs_of(network)) == (SCANS[network],)


@pytest.mark.variants(4)
@SCHEDULES
@pytest.mark.parametrize("network", [scan_reversed, scan_other_dimension], ids=lambda network: network.__name__)
def test_scan_schedules(network: Callable[..., Any], options: dict[str, Any]) -> None:
    assert check(network, *inputs_of(network), **options) == (SCANS[network],)


def test_scan_gives_what_eager_scan_gives() -> None:
    model = Model(lambda s, x: scan(lambda h, row: cell(s, h, row), x.new_zeros(B, H), x, reverse=True))
    run = torch.compile(model, backend="reroll", fullgraph=True, options={"lowering": "eager"})
    x = torch.randn(T, B, I)
    torch.testing.assert_close(run(x), model(x), rtol=1e-12, atol=1e-14)


def test_outputs_of_a_scan_that_nobody_reads_are_not_stacked() -> None:
    _, made = compare(Model(scan_last), inputs_of(scan_last), **STANDARD)
    assert [each.ys for each in made[0].recurrences] == [()]


@torch.compiler.nested_compile_region
def region(s: Model, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return cell(s, h, x)


@torch.compiler.nested_compile_region
def updating_region(s: Model, x: Tensor, h: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(s.bn(nn.functional.linear(x, s.l.weight)) + s.r(h))  # a bias would have a gradient of rounding alone
    s.seen.mul_(0.9).add_(h.detach().sum(0))
    total.mul_(0.5)
    total.add_(h)
    y = h * 2
    y += 1
    y[0] = 3
    return h.clone(), y


@torch.compiler.nested_compile_region
def spiking_region(s: Model, x: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = 0.9 * v * (1 - z) + s.l(x) + s.r(z)
    z = spike(v - 0.3)
    return v.clone(), z, nn.functional.dropout(z, 0.2)


def regions(s: Model, x: Tensor) -> Any:
    h, rows = x.new_zeros(B, H), []
    for t in range(x.shape[0]):
        h, y = region(s, x[t], h)
        rows.append(y)
    return torch.stack(rows), h


def updating_regions(s: Model, x: Tensor) -> Any:
    h, total, rows = x.new_zeros(B, H), s.l(x[0]) * 2, []
    for t in range(x.shape[0]):
        h, y = updating_region(s, x[t], h, total)
        h = h + 0.1
        rows.append(y)
    return torch.stack(rows), h, total


def spiking_regions(s: Model, x: Tensor) -> Any:
    v, rows = x.new_zeros(B, H), []
    z = torch.zeros_like(v)
    for t in range(x.shape[0]):
        v, z, y = spiking_region(s, x[t], v, z)
        rows.append(y)
    return torch.stack(rows), v


def regions_of_two_loops(s: Model, x: Tensor) -> Any:
    h, back = x.new_zeros(B, H), x.new_zeros(B, H)
    for t in range(x.shape[0]):
        h, _ = region(s, x[t], h)
    for t in reversed(range(x.shape[0])):
        back, _ = region(s, x[t], back)
        back = back * 0.5
    return h, back


REGIONS = {
    regions: ((9, 1),),
    updating_regions: ((8 if torch.__version__ >= "2.13" else 9, 6),),  # 2.13 writes the first call out itself
    spiking_regions: ((8, 1),),
    regions_of_two_loops: ((9, 1), (9, 1)),
}


@pytest.mark.variants(4)
@SCHEDULES
@pytest.mark.parametrize("network", [regions, updating_regions], ids=lambda network: network.__name__)
def test_region_schedules(network: Callable[..., Any], options: dict[str, Any]) -> None:
    assert check(network, torch.randn(T, B, I), **options) == REGIONS[network]


@pytest.mark.parametrize("network", [spiking_regions, regions_of_two_loops], ids=lambda network: network.__name__)
def test_regions(network: Callable[..., Any]) -> None:
    assert check(network, torch.randn(T, B, I)) == REGIONS[network]


def test_lines_in_a_region_are_the_user_s() -> None:
    _, made = compare(Model(regions), (torch.randn(T, B, I),), **STANDARD)
    (recurrence,) = made[0].recurrences
    assert "h, y = region(s, x[t], h)" in recurrence.where
    (tanh,) = recurrence.step.graph.find_nodes(op="call_function", target=torch.tanh)
    assert "h = torch.tanh(s.l(x) + s.r(h))" in where(tanh)


def a_region_without_a_loop(s: Model, x: Tensor) -> Any:
    h, y = region(s, x[0], x.new_zeros(B, H))
    z, _ = region(s, x[1], y)
    return region(s, x[2] * 2, z * h)


def test_regions_without_a_loop_run_with_eager_lowering() -> None:
    assert check(a_region_without_a_loop, torch.randn(T, B, I)) == ()
