"""Recorded segments, on a simulated device, give what the same kernels give one by one: bit for bit."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
from agreement import QUICK, Results, compare, differences, results
from networks import RecurrentLIF
from reroll.backends.construct import kernels, timing
from reroll.backends.runtime import recordings as graphs
from reroll.backends.runtime.recordings import CudaGraph
from reroll.errors import RerollWarning
from reroll.planning.options import Options
from reroll.recurrence import Numbers
from simulated import SimulatedDevice
from simulated_streams import Race
from simulation import CPU, executables, simulating

T, B, I = 19, 4, 6  # noqa: E741
SCHEDULES: dict[str, dict[str, Any]] = {
    "store_all": {},
    "standard": {"chunk": 4},
    "double": {"chunk": 4, "slots": 2, "remote": "host"},
    "revolve": {"slots": 3},
}


class Dropped(nn.Module):
    """A GRU whose states are dropped out, with a readout of every step and of the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(I, 5), nn.Linear(5, 2)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH, rows = x_TBI.new_zeros(x_TBI.shape[1], 5), []
        for t in range(x_TBI.shape[0]):
            h_BH = nn.functional.dropout(self.cell(x_TBI[t], h_BH), 0.3, training=self.training)
            rows.append(self.out(h_BH))
        return torch.stack(rows), h_BH


class Momentum(nn.Module):
    """Carries that pass through a step unchanged, or as views of others; a weight that is made in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(I, I))

    def forward(self, x_TBI: Tensor) -> Tensor:
        first = old = new = x_TBI[0]
        mixed = self.weight.tanh() @ self.weight
        for t in range(x_TBI.shape[0]):
            old, new = new, torch.tanh(new @ mixed.t() + old * x_TBI[t] + first)
        return new + old


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lif": lambda: RecurrentLIF(I, 8, 3),
    "dropped": Dropped,
    "momentum": Momentum,
}


@pytest.fixture(autouse=True)
def _wide(double_precision: None) -> None:
    """Compare in float64."""


def spikes(steps: int = T) -> Tensor:
    return (torch.rand(steps, B, I) < 0.4).double() * 2


@pytest.mark.variants(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager(name: str, schedule: str) -> None:
    options = {"schedule": schedule, **SCHEDULES[schedule], "verify": True}
    with simulating() as device:
        found, _ = compare(MODELS[name](), [spikes()], calls=3, **options)
    assert not found
    assert device.replays > 20 > device.recordings > 1


@pytest.mark.inductor
@pytest.mark.parametrize("schedule", ["store_all", "double"])
def test_recorded_kernels_of_inductor_give_the_same_bits(schedule: str) -> None:
    model, given = RecurrentLIF(I, 8, 3), [spikes()]
    options = {**QUICK, "schedule": schedule, **SCHEDULES[schedule], "lowering": "inductor"}
    found: list[Results] = []
    for recorded in (True, False):
        twin = copy.deepcopy(model)
        with simulating() as device:
            run = torch.compile(twin, backend="reroll", options={**options, "cuda_graphs": recorded})
            found.append(results(run, twin, given, calls=2))
        assert (device.recordings > 0) is recorded
    assert not differences(found[0], found[1], 0.0)


class Weighted(nn.Module):
    """Every step reads a number of its own, and the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(I, I)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = mean_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(self.cell(h_BI) + x_TBI[t] / (t + 1))
            mean_BI = mean_BI + h_BI / x_TBI.shape[0]
        return mean_BI


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_numbers_of_steps_lie_where_recordings_find_them(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on the device where kernels are compiled; eager would round them to the type of a step in half
    precision, as it does with no number that is on the computer."""
    device = torch.device("cpu", 0)
    monkeypatch.setattr(kernels, "background_of", lambda _: device)
    with simulating() as simulated, executables() as made:
        found, _ = compare(Weighted(), [spikes()], calls=2, lowering=lowering, schedule="standard", chunk=4)
    assert not found
    assert simulated.replays
    assert {executable.recurrence.numbers_on for executable in made} == {device if lowering == "inductor" else CPU}
    assert all(executable.numbers for executable in made)


def test_segments_are_timed_on_numbers_where_they_lie() -> None:
    with executables() as made:
        compare(Weighted(), [spikes()], schedule="store_all")
    there = torch.device("meta")
    examples = tuple(each.detach().to(there).requires_grad_(each.requires_grad) for each in made[0].recurrence.examples)
    recurrence = replace(made[0].recurrence, numbers_on=there, examples=examples)
    compiled = kernels.compile_kernels(recurrence, Options(lowering="eager", cuda_graphs=False), [2]).compiled
    own = timing._Made.of(compiled, recurrence, compiled.segments[2]).own
    assert [places.start for places, x in recurrence.slots(2).xs if isinstance(x, Numbers)]
    assert {each.device for each in own} == {there}


class Halves(nn.Module):
    """Saved values that are halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one, self.other = (nn.Linear(I, I) for _ in range(3))

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            one, other = self.both(h_BI).chunk(2)
            h_BI = torch.tanh(torch.cat([self.one(one), self.other(other)]) + x_TBI[t])
        return h_BI


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_result_is_the_memory_of_the_input_that_holds_it(schedule: str) -> None:
    with simulating() as device:
        found, _ = compare(Halves(), [spikes()], calls=3, schedule=schedule, **SCHEDULES[schedule], segment=2)
    assert not found
    assert device.replays


@pytest.mark.parametrize("wrong", ["never", "no tapes", "no aliases"])
def test_what_lasts_is_copied_and_must_be(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would see if it were not."""
    right = CudaGraph._result

    def result(self: CudaGraph, number: int, given: Any, lasts: Any, shared: Any) -> Tensor | None:
        if wrong == "no aliases":
            return self.results[number]
        chosen = (lambda n: False) if wrong == "never" else (lambda n: n < 2 and lasts(n))
        return right(self, number, given, chosen, shared)

    monkeypatch.setattr(CudaGraph, "_result", result)
    with simulating():
        found = [compare(make(), [spikes()], calls=2, schedule="store_all")[0] for make in MODELS.values()]
    assert any(found)


def test_tapes_of_one_segment_are_passed_on() -> None:
    with simulating(), executables() as made:
        compare(RecurrentLIF(I, 8, 3), [spikes(16)], schedule="standard", chunk=2)
        compare(RecurrentLIF(I, 8, 3), [spikes(16)], schedule="store_all")
    standard, store_all = made
    assert len(standard.instructions.passing) > 0
    assert not store_all.instructions.passing


def trained(run: Any, model: nn.Module, train: Callable[[Any, nn.Module], Iterator[Tensor]]) -> Results:
    model.zero_grad()
    torch.manual_seed(3)
    found = {f"output {i}": value.detach().clone() for i, value in enumerate(train(run, model))}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def two_forwards(run: Any, model: nn.Module) -> Iterator[Tensor]:
    first, second = run(spikes()), run(spikes() + 1)
    yield from (first, second)
    first.square().sum().backward()
    second.pow(3).sum().backward()


def reversed_twice(run: Any, model: nn.Module) -> Iterator[Tensor]:
    out = run(spikes())
    out.square().sum().backward(retain_graph=True)
    run(spikes() * 2).sum().backward()
    out.pow(3).sum().backward()
    yield out


def changing_weights(run: Any, model: nn.Module) -> Iterator[Tensor]:
    for _ in range(3):
        out = run(spikes())
        out.square().sum().backward()
        yield out
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad.clamp(-1, 1))


def kept_gradients(run: Any, model: nn.Module) -> Iterator[Tensor]:
    given = [spikes().requires_grad_() for _ in range(3)]
    for each in given:
        run(each).square().sum().backward()
    yield from (each.grad for each in given if each.grad is not None)


@pytest.mark.variants(4)
@pytest.mark.parametrize("train", [two_forwards, reversed_twice, changing_weights, kept_gradients])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["lif", "momentum"])
def test_calls_do_not_disturb_each_other(name: str, schedule: str, train: Any) -> None:
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    expected = trained(model, model, train)
    with simulating() as device:
        options = {**QUICK, "schedule": schedule, **SCHEDULES[schedule]}
        run = torch.compile(twin, backend="reroll", fullgraph=True, options=options)
        assert not differences(trained(run, twin, train), expected)
    assert device.replays > 10


def test_lengths_share_recordings() -> None:
    model = RecurrentLIF(I, 8, 3)
    twin = copy.deepcopy(model)
    with simulating() as device:
        run, recordings = reroll.compile(twin, **QUICK, schedule="standard", chunk=4), list[int]()
        for steps in (12, 20, 28, 20):
            given = spikes(steps)
            assert not differences(results(run, twin, [given]), results(model, model, [given]))
            recordings.append(device.recordings)
        assert recordings == [4, 8, 8, 8], "the first length has its own: the model's mean is over its steps"


def test_the_memory_of_recordings_is_used_by_one_stream_at_a_time() -> None:
    lines, first = inspect.getsourcelines(graphs.Graphs.using)
    (number,) = [first + n for n, line in enumerate(lines) if "wait_event" in line]
    place = (Path(inspect.getfile(graphs)).name, number)

    def calls_on_two_streams(deaf: Any) -> list[str]:
        with simulating() as device:
            device.deaf = deaf
            model = RecurrentLIF(I, 8, 3)
            run = torch.compile(model, backend="reroll", options={**QUICK, "schedule": "standard", "chunk": 4})
            for stream in (*device.computes, *device.computes):
                device.compute = stream
                run(spikes()).sum().backward()
        return device.races

    assert not calls_on_two_streams(None)
    with pytest.raises(Race, match="another stream"):
        calls_on_two_streams(place)


def refusing(device: SimulatedDevice) -> str:
    def record(run: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    device.record = record  # type: ignore[method-assign]
    return "not permitted when stream is capturing"


def unsteady(device: SimulatedDevice) -> str:
    inner = device.record

    def record(run: Any) -> Any:
        made, again = inner(run)

        def otherwise() -> None:
            again()
            assert made[0] is not None
            made[0].mul_(1 + 1e-15)

        return made, otherwise

    device.record = record  # type: ignore[method-assign]
    return "a replay gives other values"


def waiting(device: SimulatedDevice) -> str:
    device.waiting = True
    return "waits for the device"


def short_of_memory(device: SimulatedDevice) -> str:
    def record(run: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    device.record = record  # type: ignore[method-assign]
    return "memory ran out while they were recorded"


@pytest.mark.parametrize("break_it", [refusing, unsteady, waiting, short_of_memory])
def test_what_cannot_be_recorded_is_run_and_said(break_it: Callable[[SimulatedDevice], str]) -> None:
    model, given = Dropped(), [spikes()]
    twin = copy.deepcopy(model)
    with simulating() as device, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        why = break_it(device)
        run = torch.compile(twin, backend="reroll", options={**QUICK, "schedule": "standard", "chunk": 4})
        found = results(run, twin, given, calls=2)
    assert not differences(found, results(model, model, given, calls=2))
    texts = [str(each.message) for each in said if issubclass(each.category, RerollWarning)]
    assert texts
    assert all("launched kernel by kernel" in text and why in text for text in texts)


NEAR = [
    ("forward", 1e-9, 0.0, True),
    ("forward", 1e-9, 1e-6, False),
    ("forward", 0.0, 1e-14, False),
    ("backward", 0.0, 1e-14, True),
    ("backward", 0.0, 1e-9, False),
]


@pytest.mark.parametrize(("half", "noise", "off", "recorded"), NEAR)
def test_sums_in_no_order_are_recorded_where_replays_are_as_near(
    half: str, noise: float, off: float, recorded: bool
) -> None:
    """``noise``: by which kernels differ from run to run; ``off``: by how much replays are wrong."""
    with simulating() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)

        def run(inputs: list[Any]) -> list[Tensor]:
            wrong = off if device.recordings else 0.0  # recordings are counted before they are played
            return [inputs.pop() * (1 + noise * torch.randn(()) + wrong)]

        halves = graphs.Graphs(torch.device("cpu"))
        for _ in range(3):
            (found,) = halves.play(graphs.Half(1, half), run, [torch.ones(4)], lambda _: True)
            torch.testing.assert_close(found, torch.ones(4), atol=1e-5, rtol=0.0)
    assert (device.replays == 3) is recorded


@pytest.mark.parametrize("replays", [1.0, 3.0])
def test_recordings_that_take_longer_than_their_kernels_are_not_used(
    replays: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``replays``: seconds of one, where the kernels take two; sometimes a run takes longer than it should."""
    with simulating() as device, warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        noise = iter([9.0, 0.0, 0.0] * 2)

        def seconds(work: Callable[[], object]) -> float:
            before = device.replays
            work()
            return (replays if device.replays > before else 2.0) + next(noise)

        monkeypatch.setattr(device, "seconds", seconds)
        halves, given = graphs.Graphs(torch.device("cpu")), torch.arange(4.0)
        for number in range(3):
            (found,) = halves.play(graphs.Half(1, "forward"), lambda inputs: [inputs.pop() * 2], [given + number], bool)
            assert torch.equal(found, 2 * (given + number))
        assert device.replays - 4 == (2 if replays < 2.0 else 0)


@pytest.mark.parametrize("behind", [1.0, 4.0])
def test_segments_are_not_recorded_where_a_device_is_behind_their_launches(
    behind: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``behind``: how many times longer than to launch its kernels the device takes."""
    with simulating() as device, executables() as made:

        def seconds(work: Callable[[], object]) -> float:
            begin = time.perf_counter()
            work()
            return behind * (time.perf_counter() - begin)

        monkeypatch.setattr(device, "seconds", seconds)
        assert not compare(RecurrentLIF(I, 8, 3), [spikes()], calls=2, schedule="standard", chunk=4)[0]
    recorded = behind < 2.0
    assert (made[-1].compiled.graphs.device is not None) is recorded
    assert (device.recordings > 0) is recorded


class Drawn(nn.Module):
    """A step that draws spikes with the probabilities that it reads."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(h_BI + torch.bernoulli(x_TBI[t]))
        return h_BI


def test_segments_that_a_card_may_not_survive_are_not_timed() -> None:
    x = torch.rand(T, B, I, requires_grad=True)
    for model, timed in ((Indexing(), False), (Drawn(), False), (Dropped(), True), (RecurrentLIF(I, 8, 3), True)):
        with simulating():
            run = torch.compile(model, backend="reroll", options={**QUICK, "schedule": "standard", "chunk": 4})
            notes = " ".join(reroll.explain(run, x).notes)
        assert ("might end all work on this device" not in notes) is timed, notes


def test_a_recording_that_fails_has_others_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's generator gets another state then, of which those that draw random numbers know nothing."""
    halves = [graphs.Half(1, name) for name in ("forward", "backward")]
    with simulating() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        drawing, steady = (graphs.Graphs(torch.device("cpu"), random=random) for random in (True, False))

        def play(of: graphs.Graphs, half: graphs.Half) -> None:
            of.play(half, lambda inputs: [inputs.pop() + 1], [torch.ones(2)], bool)

        play(drawing, halves[0])
        play(steady, halves[0])
        assert device.recordings == 2
        record = device.record
        monkeypatch.setattr(device, "record", mock.Mock(side_effect=RuntimeError("failed during capture")))
        play(steady, halves[1])
        monkeypatch.setattr(device, "record", record)
        for of in (drawing, steady):
            play(of, halves[0])
        assert device.recordings == 3
        play(steady, halves[1])  # which is not tried again
        assert device.recordings == 3


class Indexing(nn.Module):
    """A step that makes an index of a value, which is one only for the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, I))

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = x_TBI[0]
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(h_BI + self.table[x_TBI[t, :, 0].clamp(0, 2).long()])
        return h_BI


@pytest.mark.parametrize("made", [Indexing, lambda: RecurrentLIF(I, 8, 3), Dropped])
def test_values_are_made_up_only_for_what_takes_any(
    made: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card an index that is none ends all work of the process."""
    with simulating() as device:
        asked = mock.Mock(side_effect=device.seconds)
        monkeypatch.setattr(device, "seconds", asked)
        monkeypatch.setattr(graphs.Graphs, "_is_slower", lambda *_: False)
        assert not compare(made(), [spikes()], schedule="store_all")[0]
    assert asked.called is (made not in (Indexing, Dropped))


def test_recording_can_be_turned_off() -> None:
    with simulating() as device, warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        assert not compare(Dropped(), [spikes()], schedule="standard", chunk=4, cuda_graphs=False)[0]
    assert (device.recordings, device.replays) == (0, 0)


def test_asking_torch_for_graphs_does_no_harm() -> None:
    model, given = RecurrentLIF(I, 8, 3), [spikes()]
    twin = copy.deepcopy(model)
    with simulating() as device:
        run = torch.compile(twin, backend="reroll", mode="reduce-overhead")
        found = results(run, twin, given, calls=2)
    assert not differences(found, results(model, model, given, calls=2))
    assert device.recordings
