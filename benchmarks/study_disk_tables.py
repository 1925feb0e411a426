"""Tables of slow and large tiers for docs/background/study.md, and their plot, from the result of ``study_disk.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from study_tables import table

Result = dict[str, Any]
LOCAL, PLAIN = "standard (no tier)", "plain BPTT"


def write(result: Result, page: Path) -> None:
    """Put the tables into the page, between ``<!-- disk:NAME -->`` and ``<!-- end -->``."""

    def filled(mark: re.Match[str]) -> str:
        lines = "\n".join(TABLES[mark[1]](result)) if mark[1] in result or mark[1] == "where" else "Not measured yet."
        return f"<!-- disk:{mark[1]} -->\n\n{lines}\n\n<!-- end -->"

    text = page.read_text("utf-8")
    page.write_text(re.sub(r"<!-- disk:(\w+) -->.*?<!-- end -->", filled, text, flags=re.DOTALL), "utf-8")


def relative(ways: Result, way: str) -> str:
    """Seconds of a way relative to the schedule that moves nothing, and what was predicted over what was measured."""
    found = ways[way]
    ratio = found["least_s"] / ways[LOCAL]["least_s"]
    return f"{ratio:.2f} ({found['predicted_s'] / found['least_s']:.2f})"


def _ways(rows: Iterable[Result]) -> list[str]:
    return [way for way in next(iter(rows))["ways"] if way not in (LOCAL, PLAIN)]


def _pace(result: Result) -> Iterator[str]:
    rows = result["pace"]["rows"]
    head = ("bandwidth", "latency", *_ways(rows))
    body = (
        (f"{row['bandwidth'] / 1e6:.0f} MB/s", f"{1e3 * row['latency']:g} ms", *told)
        for row in rows
        for told in [[relative(row["ways"], way) for way in _ways(rows)]]
    )
    return table(head, body)


def _density(result: Result) -> Iterator[str]:
    rows = result["density"]["rows"]
    head = ("spikes", "where", "written by remote", *_ways(rows))
    body = (
        (
            f"{100 * row['density']:g} %",
            "in clusters" if row["clustered"] else "anywhere",
            f"{row['ways']['remote']['written'] / 1e6:.2f} MB",
            *(relative(row["ways"], way) for way in _ways(rows)),
        )
        for row in rows
    )
    return table(head, body)


def _large(result: Result) -> Iterator[str]:
    row = result["large"]["rows"][0]
    body = (
        (
            way,
            found.get("plan", "-"),
            f"{found.get('predicted_bytes', 0) / 1e9:.2f} GB",
            f"{found['least_s']:.1f} s",
            f"{found['predicted_s']:.1f} s" if "predicted_s" in found else "-",
        )
        for way, found in row["ways"].items()
    )
    return table(("way", "plan", "on disk", "measured", "predicted"), body)


def _where(result: Result) -> Iterator[str]:
    body = (
        (
            name,
            where["cpu"],
            where["capability"],
            where["torch"],
            where["commit"],
            where["date"],
            f"`{where['command']}`",
        )
        for name, where in ((name, each["environment"]) for name, each in result.items())
    )
    return table(("part", "machine", "vectors", "torch", "commit", "when", "command"), body)


TABLES: dict[str, Callable[[Result], Iterator[str]]] = {
    "pace": _pace,
    "density": _density,
    "large": _large,
    "where": _where,
}


def draw(result: Result, file: Path) -> None:
    """A panel for each schedule: time over that without a tier, by bandwidth, a line for each latency."""
    if "pace" not in result:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["pace"]["rows"]
    ways = _ways(rows)
    figure, panels = plt.subplots(1, len(ways), figsize=(3.2 * len(ways), 3.4), sharey=True)
    for panel, way in zip(panels, ways, strict=True):
        for latency in sorted({row["latency"] for row in rows}):
            there = [row for row in rows if row["latency"] == latency]
            times = [row["ways"][way]["least_s"] / row["ways"][LOCAL]["least_s"] for row in there]
            told = [row["ways"][way]["predicted_s"] / row["ways"][LOCAL]["least_s"] for row in there]
            at = [row["bandwidth"] / 1e6 for row in there]
            (line,) = panel.plot(at, times, "o-", label=f"{1e3 * latency:g} ms")
            panel.plot(at, told, ":", color=line.get_color())
        panel.set(title=way, xscale="log", yscale="log", xlabel="bandwidth, MB/s")
        panel.grid(visible=True, which="both", alpha=0.2)
    panels[0].set_ylabel("time, standard without a tier = 1")
    panels[-1].legend(title="latency", fontsize=8)
    figure.suptitle("Time by the pace of the tier (dotted: predicted)", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
