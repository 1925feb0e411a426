"""A report as data: everything as JSON, and the trace of its programs for Perfetto and Chrome's ``about:tracing``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from reroll import __version__
from reroll.errors import UnsupportedError
from reroll.program.timeline import Timeline
from reroll.program.timeline_summary import coarser, summed
from reroll.report.by_formula import ByFormula
from reroll.report.headline import figures
from reroll.report.listing import instruction_rows, node_rows
from reroll.report.tables import stage_lines

if TYPE_CHECKING:
    from reroll.report.report import Loop, Report

EVENTS = 20_000  # of a recurrence in a trace file, at most, and as many samples of each tier
_NOMINAL = 1e-3  # a nominal unit is a millisecond there


def as_json(report: Report, most: int) -> dict[str, Any]:
    """A report as dicts, lists, texts and numbers, its lists at most ``most`` long. See ``Report.to_json``."""
    traces = [loop.trace() for loop in report.loops]
    found = figures(report, traces)
    return {
        "reroll": __version__,
        "predicted_peak_bytes": found.peak,
        "plain_peak_bytes": found.plain_peak,
        "predicted_seconds": found.seconds,
        "plain_seconds": found.plain_seconds,
        "measured_peak_bytes": report.measured_peak,
        "measured_seconds": report.measured_seconds,
        "parts_bytes": dict(found.parts),
        "remote_peaks_bytes": report.remote_peaks,
        "outputs_bytes": report.outputs,
        "outside_bytes": report.outside,
        "proved": report.proved,
        "reason": report.reason,
        "notes": list(report.notes),
        "recurrences": [_loop(loop, trace, most) for loop, trace in zip(report.loops, traces, strict=True)],
        "outer_graph": [asdict(row) for row in node_rows(report.outer)[:most]],
        "stages": list(stage_lines(report.stages)),
        "others": [as_json(each, most) for each in report.others],
    }


def _loop(loop: Loop, trace: Timeline, most: int) -> dict[str, Any]:
    recurrence, prediction, tally = loop.recurrence, loop.prediction, loop.tally
    highest = prediction.most
    nodes = node_rows(recurrence.step.graph)
    rows, left = instruction_rows(loop.program, trace, most)
    return {
        "name": recurrence.name,
        "where": recurrence.where,
        "steps": recurrence.steps,
        "left": recurrence.left,
        "plan": {**asdict(loop.choice), "text": loop.choice.describe(), "why": loop.why, "lowering": loop.lowering},
        "budget_bytes": loop.budget,
        "peak_bytes": highest.nbytes,
        "peak_at": highest.node,
        "held_bytes": highest.held,
        "scratch_bytes": highest.scratch,
        "turned_bytes": prediction.turned,
        "tier_peaks_bytes": {tier: trace.peak(tier) for tier in trace.memory},
        "tape_bytes": loop.saved,
        "outputs_bytes": loop.outputs,
        "gradients_bytes": loop.gradients,
        "seconds": None if trace.nominal else trace.seconds,
        "rerun_steps": tally.reforward_steps,
        "depth": trace.depth,
        "remote_writes": tally.remote_writes,
        "remote_reads": tally.remote_reads,
        "measured_peak_bytes": loop.measured_peak,
        "measured_seconds": loop.measured_seconds,
        "kept": dict(zip(("carries", "plain_bytes", "kept_bytes"), loop.kept, strict=True)),
        "carries": [{**asdict(line), "shape": list(line.shape)} for line in loop.carries],
        "event_products": [asdict(line) for line in loop.events],
        "rewrites": [asdict(each) for each in loop.rewrites],
        "alternatives": [{**asdict(each), "tiers": dict(each.tiers)} for each in loop.alternatives],
        "formulas": _formulas(loop.by_formula()),
        "trace": _columns(trace, most),
        "step": [asdict(row) for row in nodes[:most]],
        "program": {"instructions": trace.instructions, "left_out": left, "rows": [asdict(row) for row in rows]},
    }


def _formulas(found: ByFormula) -> dict[str, Any]:
    return {**asdict(found), "lines": [asdict(line) for line in found.lines]}


def _columns(trace: Timeline, most: int) -> dict[str, Any]:
    small = coarser(trace, most)
    return {
        "unit": "forward steps" if trace.nominal else "seconds",
        "end": trace.seconds,
        "turn": trace.turn,
        "names": list(small.names),
        "times": list(small.times),
        "memory_bytes": {tier: list(nbytes) for tier, nbytes in small.memory.items()},
    }


def chrome_trace(report: Report, most: int = EVENTS) -> dict[str, Any]:
    """Events in Chrome's trace format: a process for each recurrence, with a track for compute and for each lane of
    transfers, and a counter for each tier. At most about ``most`` events of a track and samples of a tier.

    Raises UnsupportedError without a recurrence.
    """
    if not report.loops:
        raise UnsupportedError(f"There is no trace: no recurrence was found ({report.reason}).")
    traces = [loop.trace() for loop in report.loops]
    events: list[dict[str, Any]] = []
    for process, (loop, trace) in enumerate(zip(report.loops, traces, strict=True), start=1):
        title = f"{loop.recurrence.name}: {loop.choice.describe()}"
        events += _names(process, title, trace.tracks())
        timed = [*_slices(process, trace, most), *_counters(process, trace, most), _turn(process, trace)]
        events += sorted(timed, key=lambda event: event["ts"])
    unit = "1 ms stands for one forward step" if any(trace.nominal for trace in traces) else "predicted seconds"
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"reroll": __version__, "time": unit},
    }


def _names(process: int, title: str, tracks: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": {"name": title}}
    for thread, track in enumerate(tracks, start=1):
        about = {"ph": "M", "pid": process, "tid": thread, "ts": 0}
        yield {**about, "name": "thread_name", "args": {"name": track}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slices(process: int, trace: Timeline, most: int) -> Iterator[dict[str, Any]]:
    threads = {track: thread for thread, track in enumerate(trace.tracks(), start=1)}
    events = trace.events
    if len(events) > most:
        events = summed(events, trace.seconds / most, apart=False)
    for event in events:
        begin = _microseconds(trace, event.begin)
        about = {"steps": f"{event.start} to {event.stop}", "again": event.again, "instructions": event.count}
        yield {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": process,
            "tid": threads[event.track],
            "ts": begin,
            "dur": round(_microseconds(trace, event.end) - begin, 3),
            "args": {**about, "bytes": event.nbytes} if event.nbytes else about,
        }


def _counters(process: int, trace: Timeline, most: int) -> Iterator[dict[str, Any]]:
    small = coarser(trace, most)
    for tier, nbytes in small.memory.items():
        about = {"ph": "C", "name": f"memory, {tier}", "pid": process, "tid": 0}
        changes = [(0.0, -1), *zip(small.times, nbytes, strict=True), (small.seconds, 0)]
        for (_, before), (time, after) in pairwise(changes):
            if after != before:
                yield {**about, "ts": _microseconds(trace, time), "args": {"bytes": after}}


def _turn(process: int, trace: Timeline) -> dict[str, Any]:
    return {"ph": "i", "name": "turn", "s": "p", "pid": process, "tid": 1, "ts": _microseconds(trace, trace.turn)}


def _microseconds(trace: Timeline, seconds: float) -> float:
    return round(1e6 * seconds * (_NOMINAL if trace.nominal else 1), 3)
