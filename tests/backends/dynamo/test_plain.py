"""What plain PyTorch holds, from a graph on fake tensors: as measured; and what is said where plans hold more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks import Spike
from reroll.backends.dynamo import entry, plain
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.python_state.state_cache import Reach
from reroll.backends.front.recorded import Recorded
from reroll.capture.folded import UNFOLD, unfolded
from reroll.errors import RerollWarning

MORE = "More memory than plain PyTorch"
WAYS: dict[str, Callable[..., Any]] = {
    "reroll.compile": lambda model, **how: reroll.compile(model, lowering="eager", **how),
    "backend": lambda model, **how: torch.compile(model, backend="reroll", options={"lowering": "eager", **how}),
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What plain PyTorch was found to hold, of each graph."""
    peaks = list[int | None]()

    def asked(_: object, peak: Callable[[], int | None], **_how: object) -> str:
        peaks.append(peak())
        return ""

    monkeypatch.setattr("reroll.backends.dynamo.entry.more_than_plain", asked)
    monkeypatch.setattr(plain, "_MATTERS", 0)
    monkeypatch.setattr(plain, "_PART", 1 << 60)
    return peaks


class Gates(nn.Module):
    """A cell whose weights are added to at every step, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.cell, self.out = nn.Linear(8, 8), nn.GRUCell(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[1], 32), []
        for t in range(x.shape[0]):
            h = self.cell(self.read(x[t]), h)
            outs.append(self.out(h))
        return torch.stack(outs)


class Spiking(nn.Module):
    """A function of the user's own, which saves what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        v, count = x.new_zeros(x.shape[1], 32), x.new_zeros(x.shape[1], 32)
        for t in range(x.shape[0]):
            v = 0.9 * v + self.read(x[t])
            spikes = Spike.apply(v)  # type: ignore[no-untyped-call]
            v, count = v - spikes, count + spikes
        return count


class Attending(nn.Module):
    """Values that eager expands, which are views there: linear attention."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.key(x), self.value(x)
        s, outs = x.new_zeros(x.shape[1], 16, 16), []
        for t in range(x.shape[0]):
            s = 0.9 * s + k[t][..., None] * v[t][:, None]
            outs.append((k[t][..., None] * s).sum(-2))
        return torch.stack(outs)


class Filtering(nn.Module):
    """Convolutions and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.tanh(self.norm(self.conv(h + x[t])))
        return h


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gates": (Gates, (24, 4, 8)),
    "spikes": (Spiking, (24, 4, 8)),
    "attention": (Attending, (24, 4, 8)),
    "convolutions": (Filtering, (24, 2, 2, 12, 12)),
}


def held(model: nn.Module, x: Tensor) -> int:
    """The local peak of a training step whose loss holds no more than its gradient."""

    def step() -> None:
        found = model(x)
        found.backward(torch.ones_like(found))

    step()
    model.zero_grad(set_to_none=True)
    return reroll.measure(step, [model]).local_peak


@pytest.mark.parametrize(("name", "door"), zip(NETWORKS, (*WAYS, *WAYS), strict=True))
def test_plain_is_predicted_as_measured(name: str, door: str, found: list[int | None]) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    WAYS[door](model)(x)
    assert found[0] == pytest.approx(held(model, x), rel=0.03)


class Behind(nn.Module):
    """A loop that reads another one's rows, and the last rows of both."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.first, self.second = nn.Linear(8, 16), nn.RNNCell(16, 16), nn.GRUCell(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        read, h, g, rows, out = self.read(x), x.new_zeros(x.shape[1], 16), x.new_zeros(x.shape[1], 8), [], []
        for t in range(x.shape[0]):
            h = self.first(read[t], h)
            rows.append(h)
        for row in rows:
            g = self.second(row * 2, g)
            out.append(torch.tanh(g))
        return torch.stack(out) + h.sum()


@pytest.mark.parametrize("steps", [60, 97])
@pytest.mark.parametrize("name", [*NETWORKS, "behind"])
def test_a_folded_graph_holds_what_the_whole_one_does(name: str, steps: int) -> None:
    make, shape = {**NETWORKS, "behind": (Behind, (24, 4, 8))}[name]
    gm, *_ = Recorded(make(), folds=True).record(Call((torch.randn(steps, *shape[1:]),), {}), Reach().ran)
    assert UNFOLD in gm.meta
    folded = plain.plain_peak(gm)
    whole = plain.plain_peak(unfolded(gm))
    assert folded == pytest.approx(whole, rel=5e-3)


@pytest.mark.parametrize("door", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fraction_is_one_of_what_plain_pytorch_holds(name: str, door: str) -> None:
    """It was one of what reroll holds without a budget, which is less: 0.62 of that of gates."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    whole = held(model, x)
    report = reroll.explain(WAYS[door](model, memory_budget=0.6), x)
    assert 0.6 * 0.75 * whole < report.predicted_peak <= 0.61 * whole
    assert all(loop.budget and loop.budget <= 0.61 * whole for loop in report.loops)


def test_where_plain_is_not_known_a_fraction_says_of_what_it_is() -> None:
    x = torch.randn(24, 4, 8)
    store_all = reroll.explain(WAYS["reroll.compile"](nn.LSTM(8, 8)), x).predicted_peak
    run = WAYS["reroll.compile"](nn.LSTM(8, 8), memory_budget=0.7)
    with pytest.warns(RerollWarning, match="memory_budget=0.7 is a fraction of what reroll would hold without"):
        run(x)
    assert reroll.explain(run, x).predicted_peak <= 0.7 * store_all


@pytest.mark.parametrize("door", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_held_at_most_is_known_without_a_run(name: str, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETWORKS[name]
    monkeypatch.setattr(plain, "_MATTERS", 0)
    monkeypatch.setattr(plain, "_PART", 1 << 60)
    most, needed, at_most = list[int](), list[int](), entry.Graph._at_most

    def asked(placed: Any, *_: object, **_how: object) -> str:
        needed.append(max(each.needed for each in placed))
        return ""

    def noted(graph: entry.Graph) -> int:
        most.append(at_most(graph))
        return most[-1]

    monkeypatch.setattr(entry, "more_than_plain", asked)
    monkeypatch.setattr(entry.Graph, "_at_most", noted)
    WAYS[door](make())(torch.randn(shape))
    assert most
    assert needed <= most <= [20 * each for each in needed]


@pytest.mark.parametrize("door", WAYS)
def test_more_than_plain_is_said_once_and_explained(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_MATTERS", 0)
    monkeypatch.setattr(plain, "_PART", 1 << 60)
    monkeypatch.setattr(plain, "_MORE", 0.1)
    torch.manual_seed(0)
    model, x = Gates(), torch.randn(24, 4, 8)
    run = WAYS[door](model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RerollWarning)
        for length in (24, 24, 20) if door == "reroll.compile" else (24, 24):
            run(x[:length]).sum().backward()
    (said,) = [str(each.message) for each in seen if MORE in str(each.message)]
    (noted,) = [note for note in reroll.explain(run, x).notes if MORE in note]
    assert said == noted
    assert "With memory_budget=" in said
    budget = int(said.partition("memory_budget=")[2].split()[0])
    assert reroll.explain(WAYS[door](model, memory_budget=budget), x).predicted_peak <= budget


@pytest.mark.parametrize(("matters", "grads"), [(1 << 20, True), (0, False)], ids=["small", "no gradients"])
def test_what_keeps_little_is_not_compared(matters: int, grads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()
    monkeypatch.setattr(plain, "_MATTERS", matters)
    monkeypatch.setattr(plain, "_PART", 1 << 60)
    monkeypatch.setattr(plain, "plain_peak", lambda gm, _: asked.append(gm))
    with torch.set_grad_enabled(grads):
        WAYS["reroll.compile"](Gates())(torch.randn(24, 4, 8))
    assert not asked


def test_what_is_small_beside_the_memory_of_a_machine_is_only_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()
    monkeypatch.setattr(plain, "_MATTERS", 0)
    monkeypatch.setattr(plain, "plain_peak", lambda gm, _: asked.append(gm))
    run, x = WAYS["reroll.compile"](Gates()), torch.randn(24, 4, 8)
    run(x)
    assert not asked
    reroll.explain(run, x)
    assert asked


def test_where_nothing_holds_as_little_no_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_MATTERS", 0)
    monkeypatch.setattr(plain, "_PART", 1 << 60)
    monkeypatch.setattr(plain, "plain_peak", lambda *_: 100)
    with pytest.warns(RerollWarning, match="and 100 B in plain PyTorch. No plan of these segments holds as little"):
        WAYS["reroll.compile"](Gates())(torch.randn(24, 4, 8))


def test_what_keeps_memory_that_fake_tensors_do_not_show_is_not_guessed(found: list[int | None]) -> None:
    WAYS["reroll.compile"](nn.LSTM(8, 8))(torch.randn(24, 4, 8))
    assert found == [None]
