"""A trace in Perfetto's own trace processor, which is asked what it read.

`pip install perfetto` brings the client. It fetches the processor, a program, at its first use, from Google's storage;
one that is on PATH as trace_processor_shell is taken instead. The tests are skipped where neither can be had.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import COSTS, full, loop, report
from reroll.report.export import chrome_trace
from reroll.report.report import Report

PLACED = """slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid)"""
REPORTS: dict[str, Callable[[], Report]] = {
    "full": full,
    "several": lambda: report(loop(costs=COSTS), loop("standard", steps=30, costs=COSTS)),
    "long": lambda: report(loop(steps=1_200, chunk=30, slots=5)),
}


@pytest.fixture(params=list(REPORTS))
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Report, Any]]:
    """A report, and a processor that has read its trace."""
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="no client: pip install perfetto")
    made = REPORTS[request.param]()
    made.save_trace(tmp_path / "trace.json")
    config = perfetto.TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    try:
        processor = perfetto.TraceProcessor(trace=str(tmp_path / "trace.json"), config=config)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no trace processor here, and it cannot be fetched: {error}")
    with processor:
        yield made, processor


def test_perfetto_reads_all_of_a_trace(opened: tuple[Report, Any]) -> None:
    made, processor = opened
    events = chrome_trace(made)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert not [row.name for row in processor.query("select name from stats where severity != 'info' and value > 0")]
    (found,) = processor.query(f"select count(*) as number, max(depth) as deep, min(slice.dur) as least from {PLACED}")
    assert (found.number, found.deep) == (len(slices), 0)
    assert found.least >= 0
    (last,) = processor.query(f"select max(slice.ts + slice.dur) - min(slice.ts) as whole from {PLACED}")
    first = min(event["ts"] for event in slices)
    assert last.whole / 1e3 == pytest.approx(max(event["ts"] + event["dur"] for event in slices) - first, abs=0.01)


def test_perfetto_shows_tracks_and_counters(opened: tuple[Report, Any]) -> None:
    made, processor = opened
    named = processor.query(f"select distinct process.name as loop, thread.name as track from {PLACED}")
    expected = {
        (f"{each.recurrence.name}: {each.choice.describe()}", track)
        for each in made.loops
        for track in each.trace().tracks()
    }
    assert {(row.loop, row.track) for row in named} == expected
    held = "select max(value) as most from counter join counter_track on counter.track_id = counter_track.id"
    for tier in {tier for each in made.loops for tier in each.trace().memory}:
        (row,) = processor.query(f"{held} where counter_track.name like 'memory, {tier}%'")
        assert row.most == max(each.trace().peak(tier) for each in made.loops)
