"""What follows from the measurements of ``card.py``: ratios, overlap, lengths, and the goals."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from card_points import OURS, RECURRENT, SEGMENTS, TWIN
from contenders import EAGER
from rich.console import Console
from rich.table import Table

Result = dict[str, Any]
OVERLAPS = {
    "remote (host)": "standard",
    "remote (disk)": "standard",
    "double (host)": TWIN,
    "double (disk)": TWIN,
}
"""With carries that move, and with carries that stay."""

JAX_GOAL = "JAX nested remat"


def figures(result: Result) -> Result:
    """``overlap`` (seconds with offload over seconds without), ``per_step_us`` by length, ``rows``, and ``goals``."""
    rows = {key: _row(row) for key, row in result["points"].items()}
    return {
        "rows": rows,
        "overlap": {key: _overlap(row) for key, row in rows.items()},
        "per_step_us": _per_step(result),
        "goals": list(_goals(result, rows)),
    }


def median_seconds(entry: Mapping[str, Any]) -> float | None:
    """The median of the rounds, if there were any and nothing failed."""
    return statistics.median(entry["seconds"]) if entry.get("seconds") and "error" not in entry else None


def _row(row: Result) -> Result:
    """Bytes and seconds of what was measured, and both relative to eager's where that was."""
    base = row["contenders"].get(EAGER, {})
    found = {}
    for name, entry in row["contenders"].items():
        seconds = median_seconds(entry)
        if seconds is not None and "local_peak_bytes" in entry:
            found[name] = {
                "local_peak_bytes": entry["local_peak_bytes"],
                "median_s": seconds,
                "median_ratio": _ratio(seconds, median_seconds(base)),
                "peak_ratio": _ratio(entry["local_peak_bytes"], base.get("local_peak_bytes")),
                "relative_error": entry.get("relative_error"),
                "plan": entry.get("plan", ""),
            }
    return found


def _ratio(value: float, base: float | None) -> float | None:
    return value / base if base else None


def _overlap(row: Mapping[str, Any]) -> dict[str, float]:
    """Of what has a twin of the same segments, chunks and slots."""
    pairs = ((name, twin) for name, twin in OVERLAPS.items() if name in row and twin in row)
    alike = ((name, twin) for name, twin in pairs if _numbers(row[name]["plan"]) == _numbers(row[twin]["plan"]))
    return {name: row[name]["median_s"] / row[twin]["median_s"] for name, twin in alike}


def _numbers(plan: str) -> list[str]:
    return re.findall(r"\d+", plan)


def _per_step(result: Result) -> dict[str, dict[str, float]]:
    """Microseconds of a time step of the recurrent network, by contender and length."""
    found: dict[str, dict[str, float]] = {}
    for row in sorted(result["points"].values(), key=lambda each: int(each["steps"])):
        for name, entry in row["contenders"].items() if row["network"] == RECURRENT else ():
            if (seconds := median_seconds(entry)) is not None:
                found.setdefault(name, {})[str(row["steps"])] = 1e6 * seconds / row["steps"]
    return found


def _goals(result: Result, rows: Mapping[str, Result]) -> Iterator[Result]:
    """The goals of issue 6; ``met`` is None where what it takes was not measured."""
    base = next((row for key, row in rows.items() if result["points"][key]["network"] == RECURRENT), {})
    kept = [base[name] for name in (SEGMENTS, "store_all") if name in base]
    fastest = min(kept, key=lambda each: float(each["median_s"]), default=None)
    for name in ("remote (host)", "double (host)"):
        here = base.get(name)
        for what, key, most in (("time", "median_s", 1.05), ("memory", "local_peak_bytes", 0.1)):
            value = here[key] / fastest[key] if here and fastest else None
            yield _goal(f"{what} of {name}, of the fastest compiled segments without checkpoints", value, most)
    yield _goal("longest sequence of eager in the budget, of reroll's", _length_ratio(result), 0.01)
    for key, row in rows.items():
        ours = [row[name]["median_s"] for name in ("auto", "standard") if name in row]
        if JAX_GOAL in result["points"][key]["contenders"]:
            value = min(ours) / row[JAX_GOAL]["median_s"] if ours and JAX_GOAL in row else None
            yield _goal(f"time of auto or standard, of {JAX_GOAL}: {key}", value, 1.0)


def _goal(what: str, value: float | None, most: float) -> Result:
    return {"goal": what, "value": value, "at_most": most, "met": None if value is None else value <= most}


def _length_ratio(result: Result) -> float | None:
    """Eager's longest sequence in the budget over the longest of reroll's, both of which were run."""
    found = result["lengths"].get("budget", {}).get("contenders", {})
    ours = [found[name].get("steps") or 0 for name in OURS if name in found]
    eager = found.get(EAGER, {}).get("steps")
    return eager / max(ours) if eager and max(ours, default=0) else None


def show(result: Result) -> None:
    """A table for each point, the longest sequences, the goals, and what is left out."""
    console = Console(width=150)
    for key, row in result["points"].items():
        console.print(_table(key, row, result["figures"]["rows"][key]))
    for where, lengths in result["lengths"].items():
        table = _columns(
            f"longest sequences, {where}: {lengths['limit_bytes']:,} bytes", "contender", "run", "extended"
        )
        for name, entry in lengths["contenders"].items():
            table.add_row(name, str(entry.get("steps")), str(entry.get("extended_steps")))
        console.print(table)
    goals = _columns("goals", "goal", "value", "at most", "met")
    for each in result["figures"]["goals"]:
        value = "not measured" if each["value"] is None else f"{each['value']:.3f}"
        goals.add_row(each["goal"], value, f"{each['at_most']:g}", {None: "?", True: "yes", False: "no"}[each["met"]])
    console.print(goals)
    for each in result["left_out"]:
        console.print(f"left out: {each['what']}: {each['why']}", markup=False)


def _columns(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _table(key: str, row: Result, found: Result) -> Table:
    table = _columns(
        key, "contender", "peak MB", "x eager", "ms", "x eager", "error", "overlap", "plan, or why there is none"
    )
    overlaps = _overlap(found)
    for name, entry in row["contenders"].items():
        why = str(entry.get("error") or entry.get("absent") or entry.get("plan", "")).splitlines()
        of = found.get(name)
        if of is None:
            table.add_row(name, *[""] * 6, why[0][:70] if why else "not measured")
            continue
        ratios = (f"{of[each]:.3f}" if of[each] is not None else "" for each in ("peak_ratio", "median_ratio"))
        error = "" if of["relative_error"] is None else f"{float(of['relative_error']):.0e}"
        over = f"{overlaps[name]:.3f}" if name in overlaps else ""
        peak, time = f"{of['local_peak_bytes'] / 1e6:,.1f}", f"{1e3 * of['median_s']:,.1f}"
        table.add_row(name, peak, next(ratios), time, next(ratios), error, over, why[0][:70] if why else "")
    return table
