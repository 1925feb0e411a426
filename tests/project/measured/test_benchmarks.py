"""The benchmark runs, at a size that shows nothing but that."""

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import reroll
from reroll.backends.codecs.codec import decode, encode

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
SMALL = ["--steps", "14", "--batch", "2", "--neurons", "8", "--lowerings", "eager", "--rounds", "1"]
LONG = ["--long-steps", "20", "--short-steps", "16"]


def test_benchmark_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    figures = importlib.import_module("figures")
    out = tmp_path / "figures.json"
    found = figures.main([*SMALL, *LONG, "--only", "memory,time,long", "--out", str(out)])
    written = json.loads(out.read_text())
    assert set(written["memory"]) == set(written["time"]) == set(found["memory"])
    assert all(each["local_peak_bytes"] > 0 and each["relative_error"] < 1e-5 for each in written["memory"].values())
    assert written["long"]["carries_to_remote"] > 0
    assert written["long"]["relative_error"] < 1e-5
    assert {"local peak of standard, eager, MiB", "largest relative error of a gradient"} <= {
        g[0] for g in written["goals"]
    }


@pytest.mark.campaign
def test_table_of_networks_at_a_small_size(tmp_path: Path) -> None:
    out = tmp_path / "networks.json"
    command = [sys.executable, str(FOLDER / "networks_table.py"), "--fast", "--only", "torch-gru_cell"]
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    written = json.loads(out.read_text())
    row = written["eager"]["torch-gru_cell"]
    for schedule in ("standard", "double"):
        assert "refused" not in row[schedule]
        assert row[schedule]["relative_error"] < 1e-12
        assert row[schedule]["local_peak_bytes"][schedule] < row[schedule]["local_peak_bytes"]["eager"]
    first, last = row["standard"]["compiled_after_first_calls"][0], row["standard"]["compiled_after_ten_lengths"]
    assert (first["segments"], last["segments"]) == (1, 2)  # shorter ones, for the steps that are left, once
    assert first["graphs"] == 1
    assert last["graphs"] >= 10  # each length is recorded
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    assert json.loads(out.read_text()) == written  # what is there is not measured again


@pytest.mark.campaign
def test_peaks_beside_those_of_plain(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    command = [sys.executable, str(FOLDER / "memory.py"), "--only", "torch-gru_cell", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    (row,) = json.loads(out.read_text())["eager"].values()
    assert 0 < row["reroll"] < row["plain"]
    assert row["loops"] == [64]


@pytest.mark.campaign
def test_costs_over_lengths_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    lengths = importlib.import_module("lengths")
    out = tmp_path / "lengths.json"
    small = ["--lowering", "eager", "--neurons", "8", "--batch", "2", "--networks", "network D2r"]
    small += ["--compile-steps", "12", "24", "--long-steps", "30", "--short-steps", "12", "--long-batch", "2"]
    lengths.main([*small, "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["compile, network D2r"]["long"]["first_s"] > 0
    assert written["long"]["double_at_plain_steps"]["relative_error"] < 1e-5
    assert written["long"]["step_cpu_s"] > 0


def test_records_at_a_small_size_and_what_is_said_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    records, out = importlib.import_module("records"), tmp_path / "records.json"
    small = ["--lengths", "40", "88", "--batch", "2", "--neurons", "4", "--rounds", "1"]
    records.main([*small, "--out", str(out)])
    nodes = [each["nodes"] for each in json.loads(out.read_text())["rows"].values()]
    assert nodes[0]["folded"] == nodes[1]["folded"] < nodes[0]["written"] < nodes[1]["written"]
    kept = json.loads(records.RESULT.read_text())["rows"]
    seconds = kept["1000"]["seconds"]
    assert kept["1000"]["nodes"]["folded"] == kept["100"]["nodes"]["folded"]
    said = (FOLDER.parent / "docs" / "options.md").read_text()
    assert round(seconds["folded"] / seconds["eager"]) == 3
    assert "about three times as long as the model's own forward" in said
    changes = (FOLDER.parent / "CHANGELOG.md").read_text()
    assert round(seconds["written"] / seconds["folded"]) == 6
    assert seconds["search, written"] / seconds["search, folded"] > 30
    assert "takes a sixth of the time, its loop is found in a thirtieth" in changes


def peaks(key: str, sizes: dict[int, int]) -> list[dict[str, Any]]:
    """Rows in which one contender has a local peak at each size."""
    return [{key: size, "contenders": {"double": {"local_peak_bytes": held}}} for size, held in sizes.items()]


def test_study_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    study = importlib.import_module("study")
    out, page = tmp_path / "study.json", tmp_path / "study.md"
    page.write_text("<!-- study:chunk -->\nstale\n<!-- end -->\n<!-- study:verdicts -->\n<!-- end -->\n")
    runs = []
    for _ in range(3):
        study.main(["--quick", "--only", "chunk", "--out", str(out), "--page", str(page)])
        (row,) = json.loads(out.read_text())["chunk"]["rows"]
        runs.append(row["contenders"])
    small, large = (row["contenders"][f"remote, C={chunk}"] for chunk in (4, 32))
    assert max(small["relative_error"], large["relative_error"]) < 1e-5
    names = ("remote, C=4", "remote, C=32", "eager BPTT")
    least = [min(run[name]["local_peak_bytes"] for run in runs) for name in names]
    assert least[0] < least[1] < least[2]  # of several runs: a carry may wait for a disk that others use
    assert small["remote_peak_bytes"] > large["remote_peak_bytes"]
    text = page.read_text()
    assert "| 32 |" in text
    assert "stale" not in text
    assert "not measured" in text
    assert (tmp_path / "study_chunk.png").stat().st_size > 0


@pytest.mark.campaign
def test_benchmark_for_cards_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    card = importlib.import_module("card")
    few = ["eager BPTT", "torch.compile segments", "store_all", "double (host)", "JAX nested remat"]
    small = ["--device", "cpu", "--quick", "--only", "recurrent LIF", "--out", str(tmp_path), "--contenders", *few]
    card.main(small)
    written = json.loads((tmp_path / "card_cpu.json").read_text())
    assert written["left_out"] == []
    assert set(written["points"]) == {f"recurrent LIF, T={steps}" for steps in (24, 32, 128)}
    for name, entry in written["points"]["recurrent LIF, T=128"]["contenders"].items():
        assert entry["relative_error"] < 1e-5, name
        assert entry["local_peak_bytes"] > 0
        assert entry["seconds"]
    first = written["points"]["recurrent LIF, T=32"]["contenders"]
    assert set(first) == set(few)
    assert "absent" in first["JAX nested remat"] or first["JAX nested remat"]["relative_error"] < 1e-5
    lengths = written["lengths"]["budget"]["contenders"]
    assert lengths["double (host)"]["steps"] > lengths["eager BPTT"]["steps"] > 100
    assert all((tmp_path / f"card_cpu_{name}.png").stat().st_size > 0 for name in ("memory", "length"))
    again = card.main(small)  # what is there is not measured again
    assert again["points"] == written["points"]
    assert again["lengths"] == written["lengths"]


def test_a_wrong_gradient_ends_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    study = importlib.import_module("study")
    monkeypatch.setattr(study, "held", lambda *_: {"relative_error": float("nan")})
    (point,) = study.points(True, "eager")["chunk"]
    with pytest.raises(RuntimeError, match=r"remote, C=4 of .* gives wrong gradients"):
        study.row(point, None)


def test_page_of_the_study_is_that_of_its_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    committed = FOLDER.parent / "docs" / "background" / "study.md"
    page = Path(shutil.copy(committed, tmp_path))
    importlib.import_module("study_tables").write(json.loads((FOLDER / "results" / "study.json").read_text()), page)
    assert page.read_text() == committed.read_text()


def test_what_a_budget_allows_lies_between_the_measured_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    claims = importlib.import_module("study_claims")
    rows = peaks("steps", {100: 10, 400: 20})
    rows[1]["contenders"]["plain"] = {"local_peak_bytes": 14.142}
    assert claims.reached(rows, "steps", "double", "plain", 400) == "200"  # grows with the root of T
    rows[1]["contenders"]["plain"] = {"local_peak_bytes": 20}
    assert claims.reached(rows, "steps", "double", "plain", 400) == "over 400"
    rows[1]["contenders"]["plain"] = {"local_peak_bytes": 9}
    assert claims.reached(rows, "steps", "double", "plain", 400) == "under 100"


@pytest.mark.campaign
def test_first_steps_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    first = importlib.import_module("first_steps")
    before, after = first.row("GRU cell", "backend, eager", core=0, lengths=(8, 8))
    assert before > after >= 0
    assert len(first.row("nn.LSTM", "eager", core=0, lengths=(8, 9, 10))) == 3


@pytest.mark.campaign
def test_losses_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    losses = importlib.import_module("losses")
    eager = {way: (inside, {**options, "lowering": "eager"}) for way, (inside, options) in losses.WAYS.items()}
    monkeypatch.setattr(losses, "WAYS", eager)
    for name in losses.CASES:
        found = losses.row(name, steps=12, rounds=1, core=0)
        assert set(found) == {"eager", *losses.WAYS}
        assert max(row["error"] for row in found.values()) < 1e-4


@pytest.mark.campaign
def test_truncated_steps_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    truncated = importlib.import_module("truncated")
    monkeypatch.setattr(truncated, "WAYS", {"truncate": {"lowering": "eager"}})
    found = truncated.row(24, rounds=1, core=0, every=6)
    assert found["truncate"]["error"] < 1e-4 < found["plain BPTT"]["error"]


@pytest.mark.campaign
def test_other_batch_sizes_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    start = importlib.import_module("start")
    found = start.row("GRU cell", "eager", steps=8, core=0)
    assert found["sizes"] == [32, 24, 16, 28, 20]
    assert len(found["first_s"]) == 5
    assert found["error"] == 0
    monkeypatch.setitem(start.TEN, "GRU cell", (*start.TEN["GRU cell"][:2], 8))
    assert start.shared("GRU cell", rounds=2, core=0)["any size"]["median_s"] > 0
    monkeypatch.setitem(start.TEN, "GRU cell", (*start.TEN["GRU cell"][:2], 40))
    told = start.of_lengths("GRU cell", core=0)
    assert [len(told[each]) for each in ("first_s", "again_s", "record_s", "eager_forward_s")] == [10] * 4
    assert 0 < told["error"] < 1e-4


def test_what_demos_print_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shown = importlib.import_module("shown")
    text = "Accuracy on 360 held-out digits: 0.958\nplain BPTT 0.20 CPU s a step, local peak 30.86 MB\n"
    assert shown.OUTCOME.search(text).groupdict() == {"held_out": "360", "value": "0.958"}
    assert shown.COST.findall(text) == [("plain BPTT", "0.20", "30.86")]
    assert shown.ROW.findall("│ steps re-run  40 (1.00 for each)   │") == [("steps re-run", "40 (1.00 for each)")]


def test_outcomes_of_a_suite_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    matrix = importlib.import_module("matrix")
    suite = tmp_path / "test_three.py"
    suite.write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert False\n"
        "@pytest.mark.skip('no card')\ndef test_left(): pass\n@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_set_up(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(suite), f"--junitxml={report}"]
    subprocess.run([*command, "-c", os.devnull], check=False, capture_output=True)
    found = matrix.outcomes(report)
    assert (found["passed"], found["skipped"]) == (1, {"no card": 1})
    assert [name.split("::")[1] for name in found["failed"]] == ["test_set_up", "test_wrong"]


def test_planning_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    planner = importlib.import_module("planner")
    row = planner.planned(6, 0.6)
    assert 0 < row["planning_s"] < row["compilation_s"]
    planner.show({"rows": [row]}, Console(file=io.StringIO()))


def test_contenders_over_depth_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    depth, networks = (importlib.import_module(name) for name in ("depth", "depth_networks"))
    small = networks.Case(partial(networks.ViT, width=48), networks.images(2), (6,))
    monkeypatch.setitem(depth.NETWORKS, "small", small)
    monkeypatch.setattr(reroll, "compile", partial(reroll.compile, lowering="eager"))
    ways = ("checkpoint of each block", "reroll, standard", "reroll, budget 0.60", "reroll, least")
    rows = {way: depth.row("small 6", way, 1, 0) for way in ways}
    assert all(row["relative_error"] < 1e-5 and row["peak"] < row["eager_peak"] for row in rows.values())
    assert rows["reroll, budget 0.60"]["peak"] <= 0.6 * rows["reroll, budget 0.60"]["eager_peak"]
    assert rows["reroll, least"]["peak"] == min(row["peak"] for row in rows.values())
    depth.show({"small 6": {**rows, "eager": {"failed": "no answer"}}}, Console(file=io.StringIO()))


def test_a_contender_over_depth_in_another_process_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it answers with eager's gradients, of which one differs, and half a second for every step."""
    monkeypatch.syspath_prepend(str(FOLDER))
    depth, networks = (importlib.import_module(name) for name in ("depth", "depth_networks"))
    monkeypatch.setitem(
        depth.NETWORKS, "small", networks.Case(partial(networks.Mixer, width=8), networks.images(2), (1,))
    )
    torch.manual_seed(0)
    x, wanted = networks.NETWORKS["small"].batch()
    network = networks.NETWORKS["small"].make(1)
    networks.loss_of(network(x), wanted).backward()
    found = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    found["head.weight"] = 1.5 * found["head.weight"]
    np.savez(tmp_path / "found.npz", **found)
    python = tmp_path / "python"
    told = json.dumps({"first_s": 2.0, "peak": 7})
    steps = "while read line; do echo 0.5; done"
    python.write_text(f"#!/bin/sh\ncp '{tmp_path}/found.npz' \"$2\"\necho '{told}'\n{steps}\n")
    python.chmod(0o755)
    row = depth.row("small 1", "JAX scan", 2, 0, str(python))
    assert row["relative_error"] == pytest.approx(0.5)
    assert (row["peak"], row["first_s"], row["time"]["median_s"]) == (7, 2.0, 0.5)
    assert row["time"]["median_ratio"] > 0
    python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SystemExit, match="JAX ended"):
        depth.row("small 1", "JAX scan", 2, 0, str(python))


def test_gradients_that_are_rounding_alone_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    depth = importlib.import_module("depth")
    expected = [torch.tensor([1.0, 2.0]), torch.tensor([1e-9]), torch.tensor([1e-6])]
    error = partial(depth.relative_error, rounding=depth.ROUNDING)
    assert error([expected[0], torch.tensor([5e-9]), expected[2]], expected) == 0
    assert error([*expected[:2], 2 * expected[2]], expected) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["GPT", "BERT", "LLaMA", "ViT", "ResNet", "U-Net", "MLP-Mixer"])
def test_networks_over_depth_in_jax_have_the_gradients_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    depth, networks = (importlib.import_module(name) for name in ("depth", "depth_networks"))
    case = networks.NETWORKS[kind]
    torch.manual_seed(0)
    example = tuple(each.double() if each.is_floating_point() else each for each in case.batch())
    doubled = networks.Case(lambda blocks: case.make(blocks).double(), lambda: example, (3,))
    monkeypatch.setitem(depth.NETWORKS, kind, doubled)
    assert depth.row(f"{kind} 3", "JAX scan, dots", 1, 0)["relative_error"] < 1e-6  # JAX's softmax is float32


def test_jax_keeps_less_over_depth_with_remat(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.syspath_prepend(str(FOLDER))
    depth, networks = (importlib.import_module(name) for name in ("depth", "depth_networks"))
    monkeypatch.setitem(
        depth.NETWORKS, "GPT", networks.Case(partial(networks.GPT, width=32), networks.text(2, 64), (8,))
    )
    rows = {way: depth.row("GPT 8", way, 1, 0) for way in depth.JAX_WAYS}
    assert all(row["relative_error"] < 1e-5 for row in rows.values())
    everything, dots, full = (row["peak"] for row in rows.values())
    assert full < dots < everything
    depth.show({"GPT 8": rows}, Console(file=io.StringIO()))


@pytest.mark.campaign
@pytest.mark.parametrize("script", ["threads", "segment_lengths"])
def test_one_network_at_a_small_size(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module: Any = importlib.import_module(script)
    make, inputs, _ = module.NETWORKS["GRU cell"]
    monkeypatch.setattr(module, "NETWORKS", {"GRU cell": (make, inputs, 24)})
    given: Any = {"threads": ((1, 2),), "segment_lengths": (0, (2, 4))}[script]
    found = module.row("GRU cell", 1, *given)
    ways = found["ways" if script == "threads" else "lengths"]
    assert set(ways) == ({"eager, 1", "reroll, 1", "eager, 2", "reroll, 2"} if script == "threads" else {"2", "4"})
    assert max(each.get("error", each.get("relative_error")) for each in ways.values()) < 1e-4


def test_linear_steps_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    linear: Any = importlib.import_module("linear")
    found = linear.row(linear.Point(4, 2, 64), 1, 0, lowering="eager")["contenders"]
    assert set(found) == {linear.EAGER, linear.CHECKPOINT, linear.TOGETHER, linear.ONE_BY_ONE}
    assert max(each["relative_error"] for each in found.values()) < 1e-4
    assert found[linear.TOGETHER]["local_peak_bytes"] != found[linear.ONE_BY_ONE]["local_peak_bytes"]


@pytest.mark.campaign
def test_rewrites_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    rewrites: Any = importlib.import_module("rewrites")
    found = rewrites.row(rewrites.Point(neurons=32, batch=4, steps=24, density=0.2), 1, 0, lowering="eager")
    assert 0.15 < found["density"] < 0.25
    assert set(found["ways"]) == {rewrites.ALL, *rewrites.LEFT_OUT}
    assert max(each["relative_error"] for each in found["ways"].values()) < 1e-5


@pytest.mark.campaign
@pytest.mark.parametrize("part", ["pace", "density", "large"])
def test_slow_disks_at_a_small_size(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_registry: None
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path))
    study, tables = importlib.import_module("study_disk"), importlib.import_module("study_disk_tables")
    small = {
        "STEPS": 64,
        "BATCH": 4,
        "NEURONS": 64,
        "BANDWIDTHS": (5e7,),
        "LATENCIES": (0.0, 1e-3),
        "DENSITIES": (0.1,),
    }
    small |= {"LARGE_STEPS": 64, "LARGE_BATCH": 4, "LARGE_NEURONS": 16, "PACE": (5e7, 1e-3)}
    for name, value in small.items():
        monkeypatch.setattr(study, name, value)
    found = study.PARTS[part](1)
    ways = [each for row in found for way, each in row["ways"].items() if way != study.PLAIN]
    assert max(each["relative_error"] for each in ways) < 1e-4
    assert max(each["written"] for each in ways) > 0 or part == "large"
    page = tmp_path / "page.md"
    page.write_text(f"<!-- disk:{part} -->\n<!-- end -->\n")
    tables.write({part: {"rows": found}}, page)
    assert page.read_text().count("\n| ") >= 3


def test_a_paced_tier_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    paced: Any = importlib.import_module("paced")
    tier = paced.PacedTier(paced.Lane(1e6, 0.01), paced.Lane(2e6, 0.0))
    values = [encode(torch.randn(50, 50), "raw") for _ in range(3)]  # 10,000 bytes each
    begin = time.perf_counter()
    blocks = [tier.write([value]) for value in values]
    tier.drain()
    assert time.perf_counter() - begin >= 3 * (0.01 + 0.01)
    begin = time.perf_counter()
    blocks[0].prefetch()
    blocks[1].prefetch()
    assert torch.equal(decode(blocks[1].read()[0]), decode(values[1]))
    assert time.perf_counter() - begin >= 2 * 0.005
    assert (tier.traffic.bytes_written, tier.traffic.bytes_read) == (30_000, 20_000)


@pytest.mark.campaign
def test_long_run_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(FOLDER))
    long_run = importlib.import_module("long_run")
    small = ("steps=40", "channels=12", "neurons=8", "batch=4", "speakers=2", "budget=64", "lowering=eager")
    out = tmp_path / "new" / "words.json"
    for _ in range(2):  # the second time it is there
        long_run.main(["--seeds", "3", "4", "--rounds", "4", "--out", str(out), "--demo", *small])
    written = json.loads(out.read_text())
    assert set(written["seeds"]) == {"3", "4"}
    for row in written["seeds"].values():
        plain, rolled = row["plain BPTT"], row["reroll"]
        assert rolled["gradients_off"] < 1e-10
        assert rolled["local_peak"] < plain["local_peak"]
        assert rolled["losses"] == pytest.approx(plain["losses"], abs=1e-3)
        assert list(rolled["accuracies"]) == ["1", "2", "3", "4"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_long_training_is_as_good_as_plain_bptt() -> None:
    kept = json.loads((FOLDER / "results" / "spoken_digits.json").read_text())
    assert (kept["sizes"]["rounds"], kept["sizes"]["steps"], len(kept["seeds"])) == (2000, 1000, 3)
    for row in kept["seeds"].values():
        plain, rolled = row["plain BPTT"], row["reroll"]
        assert abs(plain["accuracies"]["2000"] - rolled["accuracies"]["2000"]) < 0.02  # of 300 words: 0.01 is one sigma
        assert rolled["gradients_off"] < 1e-12
        assert rolled["local_peak"] < 512 * 1024 < plain["local_peak"] / 10
