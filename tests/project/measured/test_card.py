"""The benchmark for cards: what it measures on one is seen here with a simulated device, the rest on the CPU."""

import importlib
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


class Card:
    """A device that works behind the back of the clock: ``ask`` leaves work to it, which ``synchronize`` waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy_until = 0.0
        self.broken = False
        for name in (
            "synchronize",
            "empty_cache",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def ask(self, seconds: float) -> None:
        self.now += 0.001  # a launch returns at once
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.now = max(self.now, self.busy_until)

    def empty_cache(self) -> None: ...


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def meter() -> Any:
    return importlib.import_module("card_meter").meter_of(torch.device("cuda", 0))


def test_seconds_on_a_card_are_those_of_its_work_and_of_nothing_asked_before(card: Card) -> None:
    card.ask(5.0)
    assert meter().seconds(lambda: card.ask(2.0)) == pytest.approx(2.001)


def test_bytes_on_a_card_are_those_of_the_step_without_gradients(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Linear(4, 4, bias=False)
    network.weight.grad = torch.ones(4, 4)

    def measured(step: Callable[[], None], exclude: list[nn.Module]) -> Any:
        assert exclude == [network]
        assert network.weight.grad is None  # what is there already is added to, which would count
        step()
        return mock.Mock(local_peak=500)

    monkeypatch.setattr("reroll.measure", measured)
    cost = meter().cost(lambda: card.ask(1.0), network)
    assert cost.local_peak_bytes == 500
    assert cost.seconds == pytest.approx(1.001)


def test_bytes_in_which_recorded_kernels_work(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's counters call them free, and what the pool of everybody has free is anybody's."""
    pools = [((0, 0), 0, 9), ((0, 1), 0, 30), ((0, 1), 0, 0), ((0, 2), 1, 5)]  # (pool, card, bytes that are free)
    segments = [
        {"segment_pool_id": pool, "device": index, "total_size": 64 + free, "allocated_size": 64}
        for pool, index, free in pools
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert meter().working() == 30


def test_peer_processes_tell_their_own_seconds(card: Card) -> None:
    assert meter().seconds(lambda: 0.25) == 0.25


@pytest.fixture
def sessions(tmp_path: Path) -> Callable[..., Any]:
    session, card_meter = (importlib.import_module(name) for name in ("card_session", "card_meter"))
    where = {"device": "cpu", "quick": True, "torch": torch.__version__}

    def opened(seconds: float = 60.0, **other: object) -> Any:
        return session.Session.opened(tmp_path / "card.json", card_meter.CpuMeter(), seconds, {**where, **other})

    return opened


def saved(session: Any) -> Any:
    return json.loads(session.path.read_text())


def row(session: Any) -> dict[str, Any]:
    entries: dict[str, Any] = session.result["points"].setdefault("a", {"contenders": {}})["contenders"]
    return entries


def test_a_contender_that_fails_is_recorded_and_the_others_go_on(sessions: Callable[..., Any]) -> None:
    session = sessions()
    first, second = row(session).setdefault("first", {}), row(session).setdefault("second", {})

    def fails() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert session.attempt(first, "first", fails)
    assert session.attempt(second, "second", lambda: {"seconds": [float("nan")]})
    found = saved(session)["points"]["a"]["contenders"]
    assert found["first"]["error"] == "OutOfMemoryError: CUDA out of memory."
    assert found["second"]["seconds"] == ["nan"]


def test_a_device_that_is_broken_ends_the_run_after_the_error_is_saved(
    sessions: Callable[..., Any], card: Card
) -> None:
    session = sessions()
    session.meter, card.broken = meter(), True

    def fails() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        session.attempt(row(session).setdefault("first", {}), "first", fails)
    assert "illegal memory access" in saved(session)["points"]["a"]["contenders"]["first"]["error"]


def test_what_would_end_too_late_is_left_out_and_named(sessions: Callable[..., Any]) -> None:
    session = sessions(seconds=5)
    assert not session.attempt(row(session).setdefault("first", {}), "first", dict, expected=6.0)
    assert saved(session)["left_out"] == [{"what": "first", "why": "5 s are left, and it may take 6 s"}]
    assert sessions().result["left_out"] == []


def test_a_measurement_in_which_the_process_ended_is_tried_once_more(sessions: Callable[..., Any]) -> None:
    for tries in (0, 1):
        session = sessions()
        entry = row(session).setdefault("first", {})
        assert "error" not in entry
        assert len(entry.get("started", ())) == tries
        with pytest.raises(KeyboardInterrupt):
            session.attempt(entry, "first", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "The process ended during this measurement" in row(sessions())["first"]["error"]


def test_a_file_of_another_card_is_refused(sessions: Callable[..., Any]) -> None:
    sessions().save()
    with pytest.raises(ValueError, match=r"measured with device 'cpu' and not 'NVIDIA H200'.*--out"):
        sessions(device="NVIDIA H200")


def test_the_longest_sequence_is_extended_from_the_two_nearest_lengths() -> None:
    lengths = importlib.import_module("card_lengths")
    linear = {steps: 10 * steps for steps in (100, 1_000)}
    found = lengths.extended(linear, lengths.Limit(15_000))
    assert found["extended_steps"] == pytest.approx(1_500, abs=2)
    assert found["steps"] == 1_000
    root = {100: 100, 400: 200, 1_600: 10**9}  # the last is far from the limit
    assert lengths.extended(root, lengths.Limit(400))["extended_steps"] == pytest.approx(1_600, abs=2)
    with_inputs = lengths.extended(linear, lengths.Limit(15_000, per_step=5))
    assert with_inputs["extended_steps"] == pytest.approx(1_000, abs=2)
    assert lengths.extended({100: 100, 200: 100}, lengths.Limit(400))["extended_steps"] is None


@pytest.mark.parametrize("name", ["LstmLayer", "SpikingJelly"])
def test_layers_of_others_have_the_gradients_of_the_loop(name: str) -> None:
    if name == "SpikingJelly":
        pytest.importorskip("spikingjelly")
    contenders, points, measuring = (
        importlib.import_module(each) for each in ("card_contenders", "card_points", "measuring")
    )
    kind = points.LSTM if name == "LstmLayer" else points.FEED_FORWARD
    point = points.Point(kind, 12, 3, 8, (), 0)
    x = point.inputs_on(torch.device("cpu"))
    network = contenders.network_of(point, x.device)
    model = getattr(contenders, name)(network)
    own = model if name == "LstmLayer" else network
    expected = measuring.gradients(measuring.training_step(network, network, x), network)
    found = measuring.gradients(measuring.training_step(model, own, x), own)
    assert all(each.abs().max() > 0 for each in expected)
    assert measuring.relative_error(found, expected) < 1e-5


def test_overlap_is_told_only_of_equal_plans() -> None:
    figures = importlib.import_module("card_figures")
    steps = {
        "standard": ("standard (segment 8, chunk 32)", 2.0),
        "remote (host)": ("remote (segment 8, chunk 32, host)", 3.0),
    }
    entries = {
        name: {"plan": plan, "seconds": [seconds], "local_peak_bytes": 1} for name, (plan, seconds) in steps.items()
    }
    result = {"points": {"a": {"network": "LSTM", "steps": 8, "contenders": entries}}, "lengths": {}}
    assert figures.figures(result)["overlap"] == {"a": {"remote (host)": 1.5}}
    entries["remote (host)"]["plan"] = "remote (segment 8, chunk 16, host)"
    assert figures.figures(result)["overlap"] == {"a": {}}


def test_what_jax_cannot_run_does_not_stop_its_other_ways(tmp_path: Path) -> None:
    """A stand-in for its process prints what ``speed_jax.py`` does, and half a second for every step."""
    told = [
        {"name": "JAX lax.scan", "error": "RESOURCE_EXHAUSTED"},
        {"name": "JAX nested remat", "local_peak_bytes": 7},
    ]
    jax = tmp_path / "python"
    lines = "\n".join(f"echo '{json.dumps(each)}'" for each in told)
    jax.write_text(f"#!/bin/sh\n{lines}\necho\nwhile read name; do echo 0.5; done\n")
    jax.chmod(0o755)
    ways = ["eager BPTT", "JAX lax.scan", "JAX nested remat"]
    small = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--only", "LSTM", "--contenders", *ways]
    found = importlib.import_module("card").main([*small, "--jax", str(jax)])["points"]["LSTM, T=24"]
    assert found["contenders"]["JAX lax.scan"]["error"] == "RESOURCE_EXHAUSTED"
    assert found["contenders"]["JAX nested remat"]["seconds"] == [0.5]
    assert len(found["contenders"]["eager BPTT"]["seconds"]) == 1


CONTENDERS = {
    "eager BPTT": "plain PyTorch",
    "torch.compile segments": "segments of 8 steps by `torch.compile`",
    "store_all": "reroll, `store_all`",
    "standard": "reroll, `standard`",
    "auto": "reroll, `auto`",
    "double (host)": "reroll, `double`, carries on the host",
    "JAX lax.scan": "JAX, `lax.scan`",
    "JAX nested remat": "JAX, two nested levels of `remat`",
    "nn.LSTM": "`nn.LSTM`: cuDNN over all steps",
}
BLOCKS = {
    "each block by torch.compile": "each block by `torch.compile`",
    "eager": "plain PyTorch",
    "checkpoint of each compiled block": "a checkpoint of each compiled block",
    "reroll, budget 0.5": "reroll, half of its bytes as a budget",
    "reroll, budget 0.2": "reroll, a fifth of them",
    "reroll": "reroll",
}
LAYERS = {
    "cudnn": "`nn.LSTM`: cuDNN over all steps",
    "cudnn k=8": "cuDNN in pieces of 8 steps",
    "cudnn k=32": "cuDNN in pieces of 32 steps",
    "store_all": "reroll, `store_all`, segments of 8 steps",
    "store_all segment=16": "reroll, `store_all`, segments of 16 steps",
    "standard": "reroll, `standard`",
}


def expected_rows(result: dict[str, Any]) -> Iterator[str]:
    """The rows of the tables of docs/gpus.md: of every contender that was measured."""
    for point, network in result["networks"].items():
        base, label = network["torch.compile segments"], point.partition(",")[0]
        assert set(network) <= set(CONTENDERS)
        for name in (each for each in CONTENDERS if each in network):
            seconds, nbytes = median(network[name]["seconds"]), network[name]["local_peak_bytes"]
            shares = f"{seconds / median(base['seconds']):.2f}", f"{nbytes / base['local_peak_bytes']:.3f}"
            told = f"{1e3 * seconds:.1f} ms | {shares[0]} | {nbytes / 1e6:,.0f} MB | {shares[1]}"
            yield f"| {label} | {CONTENDERS[name]} | {told} |"
    for point, ways in result["depth"]["points"].items():
        peak = ways["each block by torch.compile"]["local_peak_bytes"]
        assert set(ways) <= set(BLOCKS)
        for name in (each for each in BLOCKS if each in ways):
            own, blocks = (1e3 * median(ways[name][key]) for key in ("seconds", "base_seconds"))
            nbytes = ways[name]["local_peak_bytes"]
            label, share = point.rpartition(", ")[2], f"{nbytes / peak:.2f}"
            yield f"| {label} | {BLOCKS[name]} | {nbytes / 1e6:,.0f} MB | {share} | {own:.1f} ms | {blocks:.1f} ms |"
    for name, told in LAYERS.items():
        way = result["h100"]["layers"]["rows"][0]["ways"][name]
        yield f"| {told} | {way['ms']:.1f} ms | {way['local_peak_bytes'] / 1e6:,.0f} MB |"


def measured_on_cards() -> tuple[dict[str, Any], str]:
    """What was measured on cards, and what the page of GPUs says of it."""
    page = (FOLDER.parent / "docs" / "gpus.md").read_text()
    result = json.loads((FOLDER / "results" / "card.json").read_text())
    return result, page[page.index("## Measured") : page.index("## Measure it")]


def test_the_page_of_gpus_tells_what_was_measured() -> None:
    result, measured = measured_on_cards()
    rows = [line for line in measured.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert [row for row in rows if any(letter.isdigit() for letter in row)] == list(expected_rows(result))
    network = result["networks"]["recurrent LIF, T=1,024"]
    share = median(network["auto"]["seconds"]) / median(network["torch.compile segments"]["seconds"])
    assert round(5 * share, 1) == 1.0
    assert "takes a fifth of compiled segments' time" in (FOLDER.parent / "README.md").read_text()
    points = result["h100"]["profile"]["points"]
    ours, theirs = (points[f"Linear + LIF {name}"]["ms"] for name in ("store_all", "SpikingJelly, Triton"))
    assert f"{ours} ms by reroll's" in " ".join(measured.split())
    assert f"{theirs} ms by SpikingJelly's" in measured
    (once,) = result["one_round"]["points"].values()
    for name in ("store_all", "standard", "JAX nested remat", "SpikingJelly, Triton"):
        (seconds,), nbytes = once[name]["seconds"], once[name]["local_peak_bytes"]
        assert f"{1e3 * seconds:.1f} ms and {nbytes / 1e6:,.0f} MB by" in " ".join(measured.split())


def test_gradients_and_budgets_on_a_card_are_as_the_page_of_gpus_says() -> None:
    result, _ = measured_on_cards()
    for ways in result["depth"]["points"].values():
        assert all(each["local_peak_bytes"] <= each.get("budget_bytes", math.inf) for each in ways.values())
    entries = [(name, each) for network in result["networks"].values() for name, each in network.items()]
    assert max(each["relative_error"] for name, each in entries if "JAX" not in name) < 9e-6
    assert 7e-3 < max(each["relative_error"] for _, each in entries) < 7.5e-3


def test_predicted_peaks_on_a_card_are_as_the_page_of_gpus_says() -> None:
    result, measured = measured_on_cards()
    networks, depth = result["networks"].values(), result["depth"]["points"].values()
    ours = [(each, each["predicted_peak_bytes"]) for n in networks for each in n.values() if "plan" in each]
    ours += [(each, each["predicted_peak"]) for ways in depth for each in ways.values() if "plan" in each]
    ratios = [(each["held_bytes"] > 1 << 21, predicted / each["local_peak_bytes"]) for each, predicted in ours]
    assert all(abs(ratio - 1) < 1e-3 for recorded, ratio in ratios if not recorded)
    recorded = [ratio for held, ratio in ratios if held]
    assert f"{min(recorded):.2f} to {max(recorded):.2f} times as large" in measured


def test_the_page_of_limits_tells_how_many_tests_ran_on_a_card() -> None:
    told = json.loads((FOLDER / "results" / "card.json").read_text())["tests"]
    page = " ".join((FOLDER.parent / "docs" / "limits.md").read_text().split())
    assert f"{told['passed in one of two runs']} of the {told['of']} tests that need one passed on the second" in page
    assert f"{told['failed']} found differences of rounding" in page
    assert f"and {told['not run']} did not run there" in page


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["card_layers", "card_profile"])
def test_short_measurements_run_to_their_end(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(name)
    module.main(["--device", "cpu", "--out", str(tmp_path), "--seconds", "3600"])  # however busy the machine is
    found = json.loads((tmp_path / f"{name}.json").read_text())
    if name == "card_layers":
        ways = [each for row in found["rows"] for each in row["ways"].values()]
        assert len(ways) == 8 * len(module.SIZES)
        assert max(each["relative_error"] for each in ways) < 1e-5
    else:
        told = [each for ways in found["points"].values() for each in ways.values()]
        assert len(told) == sum(map(len, module.JOBS.values()))
        assert sum("absent" in each for each in told) == 2  # SpikingJelly's kernels need a card


def test_all_that_waits_for_a_card_is_named_as_it_is_called() -> None:
    script = (FOLDER / "card_all.sh").read_text()
    points, depth = importlib.import_module("card_points"), importlib.import_module("card_depth")
    lists = dict(re.findall(r"^([A-Z]+)=\((.*?)\)\n", script, re.MULTILINE | re.DOTALL))
    named = {name: shlex.split(text) for name, text in lists.items()}
    assert sorted(named["NETWORKS"]) == sorted(points.NETWORKS)
    assert set(named["WAYS"]) <= {*points.EVERYONE, points.CUDNN, points.SPIKINGJELLY}
    assert {*named["BLOCKS"], *named["WHOLE"]} <= set(depth.WAYS)
    always = " --seconds --out"  # which ``alone`` gives to all that it calls
    calls = re.findall(r"benchmarks/(card\w*)\.py([^>\n]*)", script.replace("\\\n", " "))
    assert {program for program, _ in calls} == {"card", "card_depth", "card_layers", "card_profile"}
    for program, options in ((program, options + always) for program, options in calls):
        text = (FOLDER / f"{program}.py").read_text() + (FOLDER / "card_session.py").read_text()
        assert all(f'"{option}"' in text for option in re.findall(r"--[a-z-]+", options)), (program, options)
