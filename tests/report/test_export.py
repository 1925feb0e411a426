"""A report as JSON, as a trace for Perfetto, as a picture, and in the tables: the same figures everywhere."""

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reports import COSTS, NASTY, full, loop, report
from reroll.errors import UnsupportedError
from reroll.report.export import chrome_trace
from reroll.report.headline import figures
from reroll.report.report import Report

NOTHING = Report((), report().outer, reason="nothing repeats")


def test_json_holds_everything_and_round_trips() -> None:
    made = full()
    data = made.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    (found,), (each,) = data["recurrences"], made.loops
    trace = each.trace()
    assert data["predicted_peak_bytes"] == made.predicted_peak == sum(data["parts_bytes"].values())
    assert data["remote_peaks_bytes"] == made.remote_peaks
    assert found["peak_bytes"] == max(found["trace"]["memory_bytes"]["local"]) == each.prediction.peak
    assert (found["seconds"], found["depth"]) == (trace.seconds, 2)
    assert found["plan"]["text"] == each.choice.describe()
    assert [row["name"] for row in found["program"]["rows"]] == list(trace.names)
    assert [row["name"] for row in found["step"]] == [node.name for node in each.recurrence.step.graph.nodes]
    assert [plan["name"] for plan in found["alternatives"]] == [plan.name for plan in each.alternatives]
    assert json.loads(json.dumps(NOTHING.to_json()))["recurrences"] == []


def test_every_key_of_the_json_is_documented() -> None:
    data = full().to_json()
    documented = set(re.findall(r"``(\w+)``", Report.to_json.__doc__ or ""))
    assert {*data, *data["recurrences"][0]} <= documented


def test_json_of_a_long_program_is_bounded() -> None:
    found = report(loop(steps=900, chunk=30, slots=5)).to_json(most=50)["recurrences"][0]
    assert len(found["trace"]["times"]) == len(found["program"]["rows"]) == 50
    assert found["program"]["instructions"] == 50 + found["program"]["left_out"]
    assert found["seconds"] is None
    assert found["trace"]["unit"] == "forward steps"


KEYS = {"X": {"cat", "dur", "args"}, "C": {"args"}, "i": {"s"}, "M": {"args"}}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def strictly_checked(data: dict[str, Any]) -> None:
    """Check a file against the Trace Event Format (JSON object form), as Perfetto reads it: nanoseconds, and slices of
    a track that nest, or it draws them wrong (perfetto.dev/docs/faq)."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named, used, counted = set(), set(), set()
    for event in data["traceEvents"]:
        phase, track = event["ph"], (event["pid"], event["tid"])
        assert event.keys() == {"ph", "name", "pid", "tid", "ts"} | KEYS[phase]
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ts"] >= 0
        if phase == "M":
            named.add((event["name"], *track))
            assert set(event["args"]) == {METADATA[event["name"]]}
        elif phase == "C":
            counted.add(event["pid"])
            assert event["args"]
            assert all(type(value) in (int, float) for value in event["args"].values())
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            used.add(track)
            begin, length = round(1000 * event["ts"]), round(1000 * event["dur"])
            assert length >= 0
            tracks.setdefault(track, []).append((begin, -length))
    assert {("thread_name", *track) for track in used} | {("process_name", pid, 0) for pid, _ in used} <= named
    assert counted == {pid for pid, _ in used}, "a process has no counter"
    for slices in tracks.values():
        around: list[int] = []
        for begin, length in sorted(slices):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or begin - length <= around[-1], "slices overlap and do not nest"
            around.append(begin - length)


def _overlapping(events: list[dict[str, Any]]) -> None:
    first = next(event for event in events if event["ph"] == "X" and event["dur"])
    events.append({**first, "ts": first["ts"] + first["dur"] / 2})


def _unnamed(events: list[dict[str, Any]]) -> None:
    events[:] = [event for event in events if event["name"] != "thread_name"]


def _uncounted(events: list[dict[str, Any]]) -> None:
    events[:] = [event for event in events if event["ph"] != "C"]


def _backwards(events: list[dict[str, Any]]) -> None:
    next(event for event in events if event["ph"] == "X").update(dur=-1)


@pytest.mark.parametrize(
    "spoil",
    [
        _overlapping,
        _unnamed,
        _uncounted,
        _backwards,
        lambda events: events[-1].pop("pid"),
        lambda events: events[-1].update(ts="0"),
        lambda events: next(event for event in events if event["ph"] == "X").pop("dur"),
        lambda events: next(event for event in events if event["ph"] == "C")["args"].update(bytes="1"),
        lambda events: next(event for event in events if event["ph"] == "i").update(s="x"),
    ],
)
def test_the_check_of_traces_refuses_what_perfetto_would(spoil: Callable[[list[dict[str, Any]]], object]) -> None:
    data = chrome_trace(full())
    strictly_checked(data)
    spoil(data["traceEvents"])
    with pytest.raises((AssertionError, KeyError, TypeError)):
        strictly_checked(data)


def of_phase(data: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in data["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("most", [20_000, 60])
@pytest.mark.parametrize("nominal", [True, False])
def test_the_trace_is_one_that_perfetto_opens(most: int, nominal: bool) -> None:
    first, second = loop(steps=200, chunk=20, slots=4), loop("standard", steps=30)
    made = report(first, second) if nominal else report(*(loop(steps=n, costs=COSTS) for n in (200, 30)))
    data = json.loads(json.dumps(chrome_trace(made, most), allow_nan=False))
    strictly_checked(data)
    assert {event["ph"] for event in data["traceEvents"]} == {"M", "X", "C", "i"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(data, "M") if e["name"] == "thread_name"}
    for process, each in enumerate(made.loops, start=1):
        trace = each.trace()
        scale = 1e3 if nominal else 1e6
        timed = [event for event in data["traceEvents"] if event["pid"] == process and event["ph"] != "M"]
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed))
        slices = [event for event in timed if event["ph"] == "X"]
        assert all(event["dur"] >= 0 for event in slices)
        assert {names[process, event["tid"]] for event in slices} == set(trace.tracks())
        assert sum(event["args"]["instructions"] for event in slices) == len(trace.events)
        assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(scale * trace.seconds)
        for track in trace.tracks():
            of_track = [event for event in slices if names[process, event["tid"]] == track]
            assert len(of_track) <= most
            assert all(round(a["ts"] + a["dur"], 3) <= b["ts"] for a, b in pairwise(of_track))
        for tier in trace.memory:
            held = [e["args"]["bytes"] for e in timed if e["ph"] == "C" and e["name"] == f"memory, {tier}"]
            assert len(held) <= most + 1
            assert (max(held), held[-1]) == (trace.peak(tier), 0)
        (turn,) = [event for event in timed if event["ph"] == "i"]
        assert turn["ts"] == pytest.approx(scale * trace.turn)
    assert ("1 ms stands for" in data["otherData"]["time"]) == nominal


def test_a_trace_is_saved(tmp_path: Path) -> None:
    full().save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text("utf-8")) == chrome_trace(full())


@pytest.mark.parametrize("name", ["plot", "save_trace"])
def test_without_a_recurrence_there_is_nothing_to_draw(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no recurrence was found \(nothing repeats\)"):
        getattr(NOTHING, name)(tmp_path / "none")


def test_a_picture_shows_every_tier(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = full()
    made.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    report(loop("standard"), *made.loops).plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text("utf-8")
    for text in ("local (MiB)", "disk (MiB)", "step", "run and taped", "double (chunk 6)", "predicted seconds"):
        assert f"<!-- {text} -->" in drawn


def test_without_matplotlib_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install matplotlib.*report\.save_html"):
        full().plot(tmp_path / "plan.png")


def test_tables_show_alternatives_and_measurements() -> None:
    made = full()
    text, (each,) = str(made), made.loops
    assert "alternatives" in text
    rows = [
        line.split() for line in text.splitlines() if line.strip().startswith(("double (chunk 6)", "standard (chunk"))
    ]
    assert [row[-1] for row in rows] == ["chosen", "beaten"]
    assert f"{made.measured_peak:,} " in text
    assert re.search(r"measured time +\S+ ms, 10 % above the prediction", text)
    assert "measured time of a training step: " in text
    assert "alternatives" not in str(report(loop()))
    assert "measured" not in str(report(loop()))
    assert each.why.split()[0] in text


def test_the_verdict_compares_with_plain_bptt() -> None:
    made = report(loop(costs=COSTS), loop("standard", steps=12, costs=COSTS))
    traces = [each.trace() for each in made.loops]
    found = figures(made, traces)
    plain = [each.plain() for each in made.loops]
    assert found.seconds is not None
    assert found.plain_seconds is not None
    assert found.seconds == sum(trace.seconds for trace in traces)
    assert found.plain_seconds == pytest.approx((24 + 12) / 2 * (7e-3 + 15e-3))  # in segments of two steps
    turned = 24 * 10
    assert found.plain_peak == 148 + max(plain[0].peak("local"), turned + plain[1].peak("local"))
    assert sum(nbytes for _, nbytes in found.parts) == made.predicted_peak
    assert f"{found.seconds / found.plain_seconds:.2f} times its time" in found.verdict()
    same = figures(report(loop("store_all")), [loop("store_all").trace()])
    assert "no less than the same segments" in same.verdict()
    assert "no time is predicted" in same.verdict()
    assert NASTY not in same.headline()
