"""Where every k-th row of an output is read, or those from some row on, no others are kept: equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from reroll.backends.construct.bytes import output_gradients
from reroll.backends.runtime import node
from reroll.backends.runtime.executable import Executable
from reroll.errors import UnsupportedError
from reroll.recurrence import RowSteps

T, B, N, C = 22, 3, 4, 9
WHOLE = "backend" if torch.__version__ >= "2.13" else "reroll.compile"  # Dynamo keeps torch's layers over time whole
DOORS = [*dict.fromkeys([WHOLE, "reroll.compile"])]
End = Callable[[Any, Tensor, Tensor], Any]
pytestmark = pytest.mark.usefixtures("double_precision")


class Net(nn.Module):
    """A loop, and what a function makes of the model, the outputs of all steps and the input."""

    def __init__(self, end: End, layer: type[nn.Module] = nn.LSTM, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn, self.readout, self.norm = layer(N, N, batch_first=batch_first), nn.Linear(N, C), nn.LayerNorm(N)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self, self.rnn(x)[0], x)


class Loop(Net):
    """The same with a Python loop: its last step runs by itself, and the ``head`` is a row before the first step."""

    def __init__(self, end: End, head: bool = False) -> None:
        super().__init__(end)
        self.cell, self.head = nn.LSTMCell(N, N), head

    def forward(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[1], N)
        c, past, states = h, h, [h] if self.head else []
        for t in range(x.shape[0]):
            h, c = self.cell(x[t] + past, (h, c))
            past = 0.9 * past + h  # nobody reads the last one
            states.append(h)
        return self.end(self, torch.stack(states), x)


def run(model: nn.Module, door: str, **options: Any) -> Any:
    options = {"lowering": "eager"} | options
    if door == "backend":
        return torch.compile(model, backend="reroll", options=options)
    return reroll.compile(model, **options)


def same(fast: Any, x: Tensor) -> None:
    """Outputs and gradients are eager's, and none where eager has none."""
    report = reroll.check(fast, x, measure=False, strict=True)
    assert report.equal, str(report)


def rows_kept(model: nn.Module, x: Tensor, door: str = "reroll.compile", **options: Any) -> list[tuple[int, int]]:
    """(first, every) of all outputs of the loops of a compiled model, which was compared with eager."""
    fast = run(model, door, **options)
    same(fast, x)
    loops = reroll.explain(fast, x).loops
    return [(each.first, each.every) for loop in loops for each in loop.recurrence.kept_rows]


def sequence(steps: int = T) -> Tensor:
    return torch.randn(steps, B, N, requires_grad=True)


READS: dict[str, tuple[End, tuple[int, int]]] = {
    "every 4th": (lambda s, y, x: y[::4], (0, 4)),
    "of those from the 3rd on": (lambda s, y, x: y[3::4].square().mean(), (3, 4)),
    "from a row on": (lambda s, y, x: y[15:], (15, 1)),
    "fewer steps than that": (lambda s, y, x: y[50:].sum(), (50, 1)),
    "a readout": (lambda s, y, x: s.readout(y)[::4], (0, 4)),
    "scores": (lambda s, y, x: F.log_softmax(s.readout(y), -1)[1::5], (1, 5)),
    "time in dimension 1": (lambda s, y, x: y.transpose(0, 1)[:, ::4], (0, 4)),
    "an entry of it": (lambda s, y, x: s.readout(y.transpose(0, 1))[:, 2::4, -1], (2, 4)),
    "a dimension is new": (lambda s, y, x: s.norm(y)[::3, None], (0, 3)),
    "beside the input": (lambda s, y, x: (y * x + x.sin())[2::4], (2, 4)),
    "joined with the input": (lambda s, y, x: torch.cat([y, x], -1).chunk(2, -1)[0][::4], (0, 4)),
    "read twice": (lambda s, y, x: (y[::4], s.readout(y)[::4].sum()), (0, 4)),
    "views": (lambda s, y, x: y.unsqueeze(-1).flatten(2).unsqueeze(0).squeeze(0)[::4], (0, 4)),
    "in place": (lambda s, y, x: torch.relu_(y * 2)[::4] * 3, (0, 4)),
    "detached in part": (lambda s, y, x: (y + y.detach())[::4], (0, 4)),
    "pixels": (lambda s, y, x: F.pixel_shuffle(y.unsqueeze(-1), 1)[::4], (0, 4)),
    "before a loss": (lambda s, y, x: F.mse_loss(y[::4], x[::4]), (0, 4)),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", READS)
def test_the_rows_that_are_read_are_kept(name: str, door: str) -> None:
    end, kept = READS[name]
    assert rows_kept(Net(end), sequence(), door) == [kept]


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", ["backend", "reroll.compile"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", ["every 4th", "from a row on", "scores", "time in dimension 1", "read twice"])
def test_rows_that_are_made_outside_of_the_loop_are_among_them(name: str, head: bool, door: str) -> None:
    end, (first, every) = READS[name]
    assert rows_kept(Loop(end, head), sequence(), door) == [
        ((first - head) % every if first <= head else first - head, every)
    ]


NOT: dict[str, End] = {
    "two different ones": lambda s, y, x: (y[::4], y[::3]),
    "two beginnings": lambda s, y, x: (y[::4], y[1::4]),
    "all are read besides": lambda s, y, x: (y[::4], y),
    "the last one besides": lambda s, y, x: (y[::4], y[-1]),
    "all are added besides": lambda s, y, x: (y[::4], y.sum(2)),
    "up to a row": lambda s, y, x: y[2:9],
    "from the end": lambda s, y, x: y[-5:],
    "time is cumulated": lambda s, y, x: y.cumsum(0)[::4],
    "time is turned": lambda s, y, x: y.flip(0)[::4],
    "they are changed in place": lambda s, y, x: (y * 2)[::4].mul_(3),
    "an operation that is not reversed on no rows": lambda s, y, x: F.pixel_shuffle(y.unsqueeze(-1), 1)[50:],
    "sizes are written": lambda s, y, x: y.reshape(y.shape[0], -1)[::4],
    "no gradient goes through the slice": lambda s, y, x: (sliced_without_gradient(y), y.sum(2)),
}


def sliced_without_gradient(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y[::4] * 2


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", NOT)
def test_what_needs_other_rows_leaves_all_of_them(name: str) -> None:
    assert rows_kept(Net(NOT[name]), sequence(), WHOLE) == [(0, 1)]


@pytest.mark.parametrize("name", ["two different ones", "the last one besides", "from the end", "sizes are written"])
def test_so_it_does_at_any_length(name: str) -> None:
    assert rows_kept(Net(NOT[name]), sequence()) == [(0, 1)]


LENGTHS = [1000, 41, 40, 39, *range(13, 0, -1)]


@pytest.mark.parametrize("name", ["every 4th", "from a row on", "beside the input", "an entry of it"])
def test_every_length(name: str) -> None:
    fast = run(Net(READS[name][0], nn.GRU), "reroll.compile")
    for steps in LENGTHS:
        same(fast, sequence(steps))


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", ["every 4th", "scores"])
def test_every_length_of_a_python_loop(name: str, head: bool) -> None:
    fast = run(Loop(READS[name][0], head), "reroll.compile")
    for steps in LENGTHS[1:]:
        same(fast, sequence(steps))


@pytest.mark.variants(4)
@pytest.mark.parametrize("steps", [2, 3, 8, 9, 37])
def test_every_length_by_the_backend(steps: int) -> None:
    for name in ("of those from the 3rd on", "scores"):
        same(run(Net(READS[name][0]), WHOLE), sequence(steps))
        torch._dynamo.reset()


class Two(nn.Module):
    """A loop with two outputs."""

    def __init__(self, end: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.end = nn.Linear(N, N), end

    def forward(self, x: Tensor) -> Any:
        v, spikes, traces = torch.zeros_like(x[0]), [], []
        for t in range(x.shape[0]):
            v = 0.9 * v + self.fc(x[t])
            z = torch.sigmoid(4 * (v - 1))
            v = v - z.detach()
            spikes.append(z)
            traces.append(v.tanh())
        return self.end(torch.stack(spikes), torch.stack(traces))


TWO: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[tuple[int, int]]]] = {
    "one of them whole": (lambda z, v: (z[::4], v), [(0, 1), (0, 4)]),
    "each its own": (lambda z, v: (z[::4], v[2::3]), [(0, 4), (2, 3)]),
    "together": (lambda z, v: (z * v)[::10], [(0, 10)]),
    "together, one of them whole": (lambda z, v: ((z + v)[::4], v.sum(1)), [(0, 1), (0, 4)]),
    "together, another one apart": (lambda z, v: ((z + v)[::4], v[::3]), [(0, 1), (0, 4)]),
    "one of nobody": (lambda z, v: v[5:], [(5, 1)]),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", ["backend", "reroll.compile"])
@pytest.mark.parametrize("name", TWO)
def test_of_two_outputs(name: str, door: str) -> None:
    end, kept = TWO[name]
    found = rows_kept(Two(end), sequence(), door)
    assert sorted({*found}) == sorted({*kept})


class HalfRate(nn.Module):
    """A second loop reads every other row of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.LSTM(N, N, batch_first=True), nn.GRU(N, C, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.slow(self.fast(x)[0][:, ::2])[0].square().sum(1)  # type: ignore[no-any-return]


def test_a_second_loop_at_half_the_rate() -> None:
    assert (0, 2) in rows_kept(HalfRate(), torch.randn(B, T, N, requires_grad=True), "backend")


def test_a_second_loop_behind_a_beginning_that_is_dropped() -> None:
    class Later(Net):
        def __init__(self) -> None:
            super().__init__(lambda s, y, x: s.second(y[3:].tanh())[0].square().mean())
            self.second = nn.GRU(N, N)

    fast = run(Later(), "reroll.compile")
    for steps in (22, 40, 9):
        same(fast, sequence(steps))
    loops = reroll.explain(fast, sequence()).loops
    assert [(each.first, each.every) for loop in loops for each in loop.recurrence.kept_rows] == [(3, 1)]


def test_rows_are_read_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of all rows has gaps; what has no others is not copied into such a layout for the second loop."""
    copied, conform = list[tuple[int, ...]](), node.conform

    def noted(value: Tensor, like: Tensor) -> Tensor:
        made = conform(value, like)
        copied.extend([tuple(value.shape)] * (made is not value))
        return made

    monkeypatch.setattr(node, "conform", noted)
    run(HalfRate(), "backend")(torch.randn(B, T, N))
    assert copied == []


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "store_all"},
        {"schedule": "double", "segment": 4},
        *(
            pytest.param(each, marks=pytest.mark.campaign)
            for each in (
                {"schedule": "standard", "segment": 3},
                {"schedule": "revolve", "segment": 2},
                {"schedule": "remote", "remote": "host", "segment": 3},
            )
        ),
        {"memory_budget": 0.5},
        pytest.param(
            {"schedule": "double", "lowering": "inductor"}, marks=[pytest.mark.inductor, pytest.mark.campaign]
        ),
        pytest.param({"lowering": "inductor"}, marks=pytest.mark.inductor),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_schedule(options: dict[str, Any]) -> None:
    for door in DOORS[-1:] if options.get("lowering") == "inductor" else DOORS:
        assert rows_kept(Net(READS["scores"][0]), sequence(83), door, **options) == [(1, 5)]


def test_truncated_gradients_are_those_of_all_rows() -> None:
    few, whole = Net(lambda s, y, x: y[::4]), Net(lambda s, y, x: y)
    whole.load_state_dict(few.state_dict())
    x = sequence()
    run(few, "reroll.compile", truncate=6)(x).sin().sum().backward()
    found, x.grad = x.grad, None
    run(whole, "reroll.compile", truncate=6)(x)[::4].sin().sum().backward()
    torch.testing.assert_close(found, x.grad)
    for ours, theirs in zip(few.rnn.parameters(), whole.rnn.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_buffers_have_the_rows_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made, empty = list[tuple[int, ...]](), Executable.empty_outputs

    def noted(self: Executable) -> list[Tensor]:
        buffers = empty(self)
        made.extend(tuple(each.shape) for each in buffers)
        return buffers

    monkeypatch.setattr(Executable, "empty_outputs", noted)
    fast = run(Net(READS["scores"][0]), "reroll.compile")
    for steps in (22, 21, 3, 1):
        made.clear()
        fast(sequence(steps))
        assert {*made} <= {(len(range(1, steps, 5)), B, N)}
        assert made or steps < 5  # which is no loop


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *((name, 1.0) for name in ("every 4th", "from a row on", "a readout")),
        ("every 4th", 0.4),
        *(pytest.param(name, 0.4, marks=pytest.mark.campaign) for name in ("from a row on", "a readout")),
    ],
)
def test_what_is_measured_is_below_what_is_predicted(name: str, budget: float) -> None:
    model, x = Net(READS[name][0]), torch.randn(120, 16, N)
    fast = run(model, "reroll.compile", memory_budget=budget)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        fast(x).square().mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    measured, report = reroll.measure(step, exclude=[model]).local_peak, reroll.explain(fast, x)
    assert measured <= report.predicted_peak + 8 * report.outputs
    assert report.predicted_peak <= 1.15 * measured


def test_less_is_held_than_all_rows() -> None:
    x, peaks = torch.randn(400, 16, N), list[int]()
    for end in (lambda s, y, x: y[::8], lambda s, y, x: y.flip(0).flip(0)[::8]):
        model = Net(end)
        fast = run(model, "reroll.compile", schedule="double")
        fast(x).sum().backward()
        model.zero_grad(set_to_none=True)
        peaks.append(reroll.measure(lambda fast=fast: fast(x).sum().backward(), exclude=[model]).local_peak)  # type: ignore[misc]
    assert peaks[0] < peaks[1] - 350 * 16 * N * 8


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model, x = Net(READS["every 4th"][0]), sequence()
    (grad,) = torch.autograd.grad(run(model, "reroll.compile")(x).sum(), x, torch.ones(()), retain_graph=True)
    assert grad[1:].abs().sum() > 0
    with pytest.raises(UnsupportedError, match="Double backward"):
        torch.autograd.grad(run(model, "reroll.compile")(x).sum(), x, create_graph=True)


def test_reversed_twice() -> None:
    model, x = Net(READS["of those from the 3rd on"][0]), sequence()
    loss = run(model, "reroll.compile", segment=4)(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("every", range(1, 6))
def test_rows_of_some_steps(first: int, every: int) -> None:
    kept, steps = RowSteps(first, every), torch.arange(23)
    rows = steps[first::every]
    assert kept.rows(23) == len(rows)
    for start in range(20):
        for count in range(1, 4):
            places, taken = kept.among(start, count)
            some = steps[start : start + count]
            assert torch.equal(rows[places], some[taken])
            assert {*rows[places].tolist()} == {*rows.tolist()} & {*some.tolist()}


def test_gradients_of_some_rows_count_with_the_zeros_of_one_segment() -> None:
    """A backward is given a row for each step of its segment, whichever rows there are."""
    segment: Any = SimpleNamespace(
        tangents=(0, 1), output_examples=(torch.empty(3, 2), torch.empty(4, 3, 2).float()), steps=4
    )
    for kept, rows in ((RowSteps(), 20), (RowSteps(0, 4), 5 + 4), (RowSteps(18, 1), 2 + 4)):
        recurrence: Any = SimpleNamespace(carries=("h",), kept_rows=(kept,), steps=20)
        assert output_gradients(segment, recurrence) == rows * 3 * 2 * 4
