"""Before any call, times are those of a few segments that are played on made-up values."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks import RecurrentLIF, spikes
from reroll.backends.construct import timing
from reroll.backends.construct.dry_run_timing import rehearsed
from reroll.schedules.machine import SegmentSeconds

T, B, N = 60, 4, 8


class Cell(nn.Module):
    """A recurrence that ``read`` says more of."""

    def __init__(self, read: Callable[[Tensor, int], Any], random: bool = False, back: bool = False) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(N, N), read
        self.dropout, self.back = nn.Dropout(0.5 if random else 0.0), back

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(B, N)
        for t in reversed(range(x.shape[0])) if self.back else range(x.shape[0]):
            h = torch.tanh(self.inner(self.dropout(h)) + self.read(x, t))
        return h


def _rows() -> Tensor:
    return torch.randn(T, B, N)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "rows": (lambda: Cell(lambda x, t: x[t]), _rows),
    "backwards": (lambda: Cell(lambda x, t: x[t], back=True), _rows),
    "numbers": (lambda: Cell(lambda x, t: x[t] * 0.9**t), _rows),
    "random": (lambda: Cell(lambda x, t: x[t], random=True), _rows),
    "wholes": (
        lambda: Cell(lambda x, t: torch.where(x[t] > 3, 1.0, 0.5)),
        lambda: torch.arange(T * B * N).view(T, B, N),
    ),
}


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("name", MODELS)
def test_some_segments_are_played(name: str, door: str) -> None:
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    options: dict[str, Any] = {"lowering": "eager"}
    by_backend = torch.compile(model, backend="reroll", options=options)
    fast = by_backend if door == "backend" else reroll.compile(model, **options)
    found = []
    before = torch.random.get_rng_state()

    def noted(executable: Any, alone: SegmentSeconds) -> Any:
        found.append((alone, rehearsed(executable, alone)))
        return found[-1][1]

    with mock.patch.object(timing, "rehearsed", noted):
        report = reroll.explain(fast, x)
    assert torch.equal(torch.random.get_rng_state(), before)
    ((alone, played),) = found
    assert played is not None
    assert played[0] >= alone.tape
    assert played[1] >= alone.backward
    costs = report.loops[0].costs
    assert costs is not None
    seconds = costs.segments[max(costs.segments)]
    assert (seconds.forward, seconds.backward) == pytest.approx(played)


def test_what_is_counted_of_spikes_is_of_calls() -> None:
    report = reroll.explain(reroll.compile(RecurrentLIF()), spikes(80))
    assert {line.calls for line in report.loops[0].events} == {0}


def test_where_another_length_trained_its_times_are_told() -> None:
    model = MODELS["rows"][0]()
    fast = reroll.compile(model, lowering="eager")
    long = torch.randn(2 * T, B, N)
    for _ in range(2):
        fast(_rows()).sum().backward()
    with mock.patch.object(timing, "rehearsed") as played, mock.patch.object(timing, "segment_seconds") as alone:
        alone.return_value = {4: SegmentSeconds(1.0, 1.0, 1.0), 1: SegmentSeconds(0.25, 0.25, 0.25)}
        first = reroll.explain(fast, _rows()).loops[0]
        second = reroll.explain(fast, long).loops[0]
    assert not played.called, "nothing need be made up"
    assert first.costs is not None
    assert second.costs is not None
    assert second.costs.segments == first.costs.segments
    assert first.measured_seconds == pytest.approx(first.trace().seconds)


class Walking(nn.Module):
    """A state that indexes a table: one segment from 0 on stays in it, several in a row do not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, N))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        h = torch.zeros(N)
        for row in x:
            h = torch.tanh(h + row + self.table.index_select(0, at + 40)[0])
            at = at + 1
        return h


def test_where_several_segments_do_not_take_made_up_values_one_says_the_time() -> None:
    fast = reroll.compile(Walking(), lowering="eager")
    with mock.patch.object(timing, "rehearsed", wraps=rehearsed) as played:
        costs = reroll.explain(fast, torch.randn(40, N), torch.tensor([-40])).loops[0].costs
    assert played.call_count == 1
    assert costs is not None
    assert costs.segments[max(costs.segments)] == played.call_args.args[1]


def test_long_segments_are_not_played() -> None:
    fast = reroll.compile(MODELS["rows"][0](), lowering="eager", segment=20)
    with mock.patch.object(timing, "rehearsed", wraps=rehearsed) as played:
        costs = reroll.explain(fast, torch.randn(T, B, N)).loops[0].costs
    assert played.call_count == 1
    alone = played.call_args.args[1]
    assert costs is not None
    assert costs.segments[20] == alone


class Beside(nn.Module):
    """A loop with a constant, rows or a first carry that lie as ``make`` says."""

    def __init__(self, make: Callable[[nn.Parameter, int], tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(N, N) / 4), nn.Parameter(torch.randn(1, N))
        self.make, self.iters = make, 24
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        constant, rows, h = self.make(self.bias, x.shape[0])
        for t in range(self.iters):
            h = torch.tanh(h @ self.weight + constant.sum(-1, keepdim=True) + rows[t] + x)
        return h


def _beside(constant: Any = None, rows: Any = None, first: Any = None) -> Any:
    def make(bias: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        plain = bias.new_zeros(batch, N)
        return (
            constant(bias, batch) if constant else plain,
            rows(bias, batch) if rows else bias.new_zeros(24, batch, N),
            first(bias, batch) if first else plain,
        )

    return make


LAYOUTS = {
    "a constant, expanded": _beside(
        lambda bias, batch: torch.arange(8.0, dtype=bias.dtype).view(1, N).expand(batch, N)
    ),
    "a parameter, expanded": _beside(lambda bias, batch: bias.expand(batch, N)),
    "one number": _beside(lambda bias, batch: bias.new_ones(()).expand(batch, N)),
    "windows that overlap": _beside(lambda bias, batch: bias.new_ones(batch + N - 1).unfold(0, N, 1)),
    "strides of one": _beside(lambda bias, batch: torch.as_strided(bias.new_ones(batch + N), (batch, N), (1, 1))),
    "a constant, turned": _beside(lambda bias, batch: bias.new_ones(N, 1).expand(N, batch).t()),
    "nothing in a row": _beside(lambda bias, batch: bias.new_ones(batch, 0)),
    "truths": _beside(lambda bias, batch: torch.ones(1, N, dtype=torch.bool).expand(batch, N)),
    "rows, expanded": _beside(rows=lambda bias, batch: torch.ones(24, 1, 1).to(bias).expand(24, batch, N)),
    "one row for all steps": _beside(rows=lambda bias, batch: bias.expand(24, batch, N)),
    "a first carry, expanded": _beside(first=lambda bias, batch: bias.new_ones(1, N).expand(batch, N)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_made_up_values_lie_as_the_users_do(name: str) -> None:
    """So that a plan that needs times can be made, and they are told."""
    model, x = Beside(LAYOUTS[name]), torch.randn(B, N, dtype=torch.float64)
    fast = reroll.compile(model, lowering="eager", segment=2, memory_budget=0.9, remote="disk")
    leaves = [*model.parameters()]
    expected, found = (torch.autograd.grad(run(x).sum(), leaves, allow_unused=True) for run in (model, fast))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert reroll.explain(fast, x).loops[0].costs is not None
