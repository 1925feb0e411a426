"""Recordings that fail, and halves whose results are views, numbers or memory of their inputs."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import QUICK, Results, compare, differences, results
from capacity import Capacity
from networks import RecurrentLIF
from reroll.backends.runtime import recordings as graphs
from reroll.backends.runtime.recordings import Graphs, Half
from reroll.backends.tiers.device import CudaDevice
from reroll.errors import RerollWarning
from simulated_streams import Race
from simulation import CPU, executables, simulating

T, B, I = 19, 4, 6  # noqa: E741


@pytest.fixture(autouse=True)
def _wide(double_precision: None) -> None:
    """Compare in float64."""


def spikes() -> Tensor:
    return (torch.rand(T, B, I) < 0.4).double() * 2


class Numbers:
    """A generator of CUDA's: a state, which recordings know, too, and believe to be theirs until they end well."""

    def __init__(self) -> None:
        self.drawn, self.recorded = 0, False

    def get_state(self) -> int:
        return self.drawn

    def set_state(self, drawn: int) -> None:
        self.drawn = drawn

    def graphsafe_get_state(self) -> Numbers:
        return self

    def graphsafe_set_state(self, other: Numbers) -> None:
        self.drawn, self.recorded = other.drawn, other.recorded


class Cuda:
    """What ``torch.cuda.graph`` needs of CUDA: a present stream, and pools that are gone with their last graph."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.present, self.pools, self.used, cuda = "default", 0, list[int](), self
        self.graphs = weakref.WeakSet[Any]()

        class Graph:
            def capture_begin(self, pool: int, **_: Any) -> None:
                cuda.numbers.recorded = True
                if pool in cuda.used and not any(each.pool == pool for each in cuda.graphs):
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                self.pool = pool
                cuda.used.append(pool)

            def capture_end(self) -> None:
                if cuda.failing:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                cuda.numbers.recorded = False
                cuda.graphs.add(self)

            def replay(self) -> None: ...

        self.failing, self.numbers = False, Numbers()
        patch.setattr(torch.cuda, "default_generators", [self.numbers])
        patch.setattr(torch, "Generator", lambda _: Numbers())
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "current_stream", lambda _=None: self.present)
        patch.setattr(torch.cuda, "Stream", lambda _=None: "recording")
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", self._pool)
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda: None)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def _pool(self) -> int:
        self.pools += 1
        return self.pools

    def _on(self, stream: str) -> Any:
        cuda = self

        class On:  # as in torch, whoever does not leave is still on the stream
            def __enter__(self) -> None:
                self.before, cuda.present = cuda.present, stream

            def __exit__(self, *_: object) -> None:
                cuda.present = self.before

        return On()


def test_a_recording_that_fails_leaves_the_stream_and_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = Cuda(monkeypatch), CudaDevice(torch.device("cuda:0"))
    seen: list[str] = []

    def run() -> list[Tensor | None]:
        seen.append(cuda.present)
        return []

    first = device.record(run)
    cuda.failing, cuda.numbers.drawn = True, 3
    with pytest.raises(RuntimeError, match="during capture"):
        device.record(run)
    assert cuda.present == "default"
    assert cuda.numbers.drawn == 3
    assert not cuda.numbers.recorded
    cuda.failing = False
    second = device.record(run)
    assert (cuda.used, seen) == ([1, 1, 2], ["recording"] * 3)
    del first, second
    gc.collect()
    third = device.record(run)  # all graphs of the pool are gone, and so is the pool
    device.record(run)
    assert cuda.used[3:] == [3, 3]
    assert cuda.present == "default"
    del third


class Gated(nn.Module):
    """A product of two views of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(I, 2 * I))

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = x_TBI[0]
        for t in range(x_TBI.shape[0]):
            a_BI, b_BI = (h_BI @ self.both + torch.cat([x_TBI[t], x_TBI[t]], 1)).chunk(2, 1)
            h_BI = torch.tanh(a_BI * torch.sigmoid(b_BI) + a_BI.relu() * b_BI)
        return h_BI


def test_views_on_tapes_are_laid_out_as_they_were_recorded() -> None:
    with simulating() as device, executables() as made:
        assert not compare(Gated(), [spikes()], calls=3, schedule="store_all")[0]
    halves = 3 * 2 * len(made[-1].lengths(0, made[-1].recurrence.steps))
    assert device.replays == halves  # that of a recording is done at once, to compare


class Scalars(nn.Module):
    """A number that is learned, one that is carried, and one that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.leak, self.norm = nn.Parameter(torch.tensor(0.7)), nn.BatchNorm1d(I, affine=False)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BI, penalty = x_TBI[0], x_TBI.new_zeros(())
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(h_BI * self.leak + self.norm(x_TBI[t]))
            penalty = penalty + h_BI.abs().sum()
        return h_BI, penalty


def test_numbers_without_dimensions_are_recorded() -> None:
    with simulating() as device, warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        model, given = Scalars(), [spikes()]
        twin = copy.deepcopy(model)
        run = torch.compile(twin, backend="reroll", options={**QUICK, "schedule": "standard", "chunk": 4})
        assert not differences(results(run, twin, given, calls=2), results(model, model, given, calls=2))
    assert device.replays > 20


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "integers": lambda x: x.view(torch.int64),
    "parts": torch.view_as_real,
    "conjugate": torch.conj,
    "empty": lambda x: x[:, :0].real > 0,
    "overlapping": lambda x: (x[:1] * 2).expand(3, 4),
    "gaps": lambda x: (x * 2)[:, 1:3],
    "none": lambda x: x.sum(),
}


@pytest.mark.parametrize("kind", ODD)
def test_results_are_what_they_would_be_without_recordings(kind: str) -> None:
    def given(seed: int) -> Tensor:
        torch.manual_seed(seed)
        value = torch.randn(3, 4)
        return torch.complex(value, value + 1) if kind in ("parts", "conjugate", "empty") else value

    def run(inputs: list[Any]) -> list[Tensor]:
        return [ODD[kind](inputs.pop())]

    with simulating(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        halves = Graphs(CPU)
        for seed in range(3):
            (found,), (expected,) = (
                halves.play(Half(1, "forward"), run, [given(seed)], lambda _: True),
                run([given(seed)]),
            )
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(found, expected)


def test_an_interruption_while_a_constant_is_copied_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(3), torch.zeros(3)
    with simulating():
        halves = Graphs(CPU)
        halves.hold("constant", [first])
        reference = weakref.ref

        def interrupted(_: Tensor) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(weakref, "ref", interrupted)
        with pytest.raises(KeyboardInterrupt):
            halves.hold("constant", [second])
        monkeypatch.setattr(weakref, "ref", reference)
        assert torch.equal(halves.hold("constant", [first])[0], first)


def test_what_is_held_is_not_written_over() -> None:
    with simulating() as device:
        halves, run = Graphs(CPU), lambda inputs: [inputs[0] * inputs[1]]
        (held,) = halves.hold("constant", [torch.ones(3)])

        def check(given: Tensor, expected: float) -> None:
            (found,) = halves.play(Half(1, "forward"), run, [given, held], lambda _: True)
            assert torch.equal(found, torch.full((3,), expected))

        check(held.view(3), 1.0)
        check(held.view(3), 1.0)
        assert device.replays == 2
        with pytest.warns(RerollWarning, match="laid out in several ways"):
            check(torch.full((3,), 5.0), 5.0)
        check(held.view(3), 1.0)
        assert device.replays == 2


def test_recordings_of_two_models_take_turns() -> None:
    """They share memory, whichever stream they are played on."""

    def calls_on_two_streams(turns: Any) -> None:
        with simulating() as device, pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "_turns_of", turns)
            models = [RecurrentLIF(6, width, 3) for width in (8, 9)]
            runs = [torch.compile(model, backend="reroll", options=QUICK) for model in models]
            for stream, run in zip((*device.computes, *device.computes), (*runs, *runs), strict=True):
                device.compute = stream
                run(torch.ones(9, 4, 6)).sum().backward()

    calls_on_two_streams(graphs._turns_of)
    with pytest.raises(Race, match="another stream"):
        calls_on_two_streams(Uncached())


class Uncached:
    """Turns of every model by itself."""

    def __call__(self, _: Any) -> graphs._Turns:
        return graphs._Turns()

    def cache_clear(self) -> None:
        """As the cache that it stands for."""


@pytest.mark.parametrize("budget", [96, 160, 400])
def test_recordings_are_within_the_budget_or_are_not_made(budget: int) -> None:
    given, made = (torch.rand(64, 16, 16) < 0.4).double() * 2, Capacity(1 << 40)
    model = RecurrentLIF(16, 32, 3).double()
    with simulating() as device, made.limiting():
        run = torch.compile(model, backend="reroll", options={**QUICK, "memory_budget": f"{budget}KiB"})
        for _ in range(3):
            run(given).sum().backward()
    assert made.peak <= budget * 1024
    assert (device.recordings > 0) is (budget == 400)


def test_a_shortage_drops_recordings() -> None:
    given = (torch.rand(64, 16, 16) < 0.4).double() * 2
    model = RecurrentLIF(16, 32, 3).double()
    twin = copy.deepcopy(model)
    with simulating() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        limit = Capacity(150 * 1024)
        run = torch.compile(model, backend="reroll", options={**QUICK, "schedule": "standard"})
        with limit.limiting():
            found = [gradients(run, model, given) for _ in range(2)]
    assert limit.failed
    assert device.recordings
    assert limit.alive < 16 * 1024, "recordings are still there"
    assert not any(differences(each, gradients(twin, twin, given)) for each in found)


def gradients(run: Any, model: nn.Module, given: Tensor) -> Results:
    model.zero_grad()
    run(given).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
