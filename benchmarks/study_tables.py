"""The tables of ``docs/background/study.md``, made from the result of ``study.py`` and put between the page's marks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from contenders import EAGER
from study_claims import claims, fourfold, reached, rows_of, tenfold
from study_points import points

Result = dict[str, Any]


def write(result: Result, page: Path) -> None:
    """Put the tables into the page, between ``<!-- study:NAME -->`` and ``<!-- end -->``."""

    def filled(mark: re.Match[str]) -> str:
        lines = "\n".join(TABLES[mark[1]](result))
        return f"<!-- study:{mark[1]} -->\n\n{lines}\n\n<!-- end -->"

    text = page.read_text("utf-8")
    page.write_text(re.sub(r"<!-- study:(\w+) -->.*?<!-- end -->", filled, text, flags=re.DOTALL), "utf-8")


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table in Markdown."""
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for cells in body:
        yield f"| {' | '.join(cells)} |"


def megabytes(nbytes: float | None) -> str:
    """Bytes in MB, three digits."""
    return "-" if nbytes is None else f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def cell(row: Result, name: str) -> str:
    """Memory, and time relative to plain BPTT's; plain BPTT's own in milliseconds."""
    found = row["contenders"].get(name)
    if found is None:
        return "-"
    time = f"{1e3 * found['median_s']:.0f} ms" if name == EAGER else f"{found['median_ratio']:.2f}"
    return f"{megabytes(found['local_peak_bytes'])}, {time}"


def where(result: Result) -> Iterator[str]:
    """Where and when each part was measured, and the load there was."""
    all_points = points(False, "inductor")
    yield from table(
        ("part", "points measured", "machine", "torch", "commit", "when", "load (1 min)", "command"),
        (
            (
                name,
                f"{len(part['rows'])} of {len(all_points[name])}",
                f"{part['environment']['machine']}, {part['environment']['cpu']}, {part['environment']['cores']} cores",
                part["environment"]["torch"],
                part["environment"]["commit"],
                part["environment"]["date"],
                _span(load[0] for row in part["rows"] for load in row["load_average"]),
                f"`{part['environment']['command']}`",
            )
            for name, part in result.items()
        ),
    )


def _span(values: Iterable[float], form: str = ".2f") -> str:
    found = sorted(values)
    if not found:
        return "-"
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"


def by_length(kind: str) -> Callable[[Result], Iterator[str]]:
    """Memory and time of a kind of network at every length, and how long sequences may be in a given memory."""

    def lines(result: Result) -> Iterator[str]:
        rows = sorted(rows_of(result, kind, "settings", "length"), key=lambda row: row["steps"])
        ladder = rows_of(result, kind, "length")
        names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
        heads = [f"T={row['steps']:,}" + (f", batch {row['batch']}" if row not in ladder else "") for row in rows]
        yield from table(
            ("", *heads, "longest T in plain BPTT's memory of T=300", "in store_all's"),
            (
                (name, *(cell(row, name) for row in rows), *(reached(ladder, "steps", name, of, 300) for of in BUDGETS))
                for name in names
            ),
        )

    return lines


BUDGETS = (EAGER, "store_all")


def by_width(kind: str) -> Callable[[Result], Iterator[str]]:
    """Memory and time of a kind of network at every width, and how wide it may be in a given memory."""

    def lines(result: Result) -> Iterator[str]:
        rows = rows_of(result, kind, "width")
        names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
        yield from table(
            (
                "",
                *(f"{row['neurons']} neurons" for row in rows),
                "most neurons in plain BPTT's memory of 128",
                "in store_all's",
            ),
            (
                (name, *(cell(row, name) for row in rows), *(reached(rows, "neurons", name, of, 128) for of in BUDGETS))
                for name in names
            ),
        )

    return lines


def overhead(result: Result) -> Iterator[str]:
    """Time of every schedule relative to plain BPTT and to ``store_all``, least to most over the settings."""
    rows = [row for row in rows_of(result, None, "settings", "length") if row["steps"] in (128, 300, 500, 900)]
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"] if name != EAGER))
    body = []
    for name in names:
        times = [{who: each["median_s"] for who, each in row["contenders"].items()} for row in rows]
        body.append((name, *(_span(each[name] / each[of] for each in times if of in each) for of in BUDGETS)))
    yield from table(("", "time, plain BPTT = 1", "time, store_all = 1"), body)


def ten(result: Result) -> Iterator[str]:
    """Ten times the length against plain BPTT's memory."""
    yield from table(
        (
            "network",
            "plain BPTT",
            "standard at 10 T",
            "double (disk) at 10 T",
            "time of double, plain BPTT at 10 T = 1",
        ),
        (
            (
                f"{row['network']}, T={short['steps']:,}, batch {row['batch']}",
                megabytes(short["contenders"][EAGER]["local_peak_bytes"]),
                *(megabytes(row["contenders"][name]["local_peak_bytes"]) for name in ("standard", "double (disk)")),
                f"{row['contenders']['double (disk)']['median_ratio']:.2f}",
            )
            for short, row in tenfold(result)
        ),
    )


def four(result: Result) -> Iterator[str]:
    """Four times the width against plain BPTT's memory."""
    yield from table(
        (
            "network",
            "plain BPTT",
            "store_all",
            "double (disk) at four times the width",
            "its time, plain BPTT there = 1",
        ),
        (
            (
                f"{wide['network']}, {narrow['neurons']} to {wide['neurons']} neurons",
                *(megabytes(narrow["contenders"][name]["local_peak_bytes"]) for name in BUDGETS),
                megabytes(wide["contenders"]["double (disk)"]["local_peak_bytes"]),
                f"{wide['contenders']['double (disk)']['median_ratio']:.2f}",
            )
            for narrow, wide in fourfold(result)
        ),
    )


def gridded(schedule: str) -> Callable[[Result], Iterator[str]]:
    """Local peak, time and remote peak of a schedule by chunk (rows) and slots (columns)."""

    def lines(result: Result) -> Iterator[str]:
        for row in rows_of(result, None, "grid"):
            found = {name: each for name, each in row["contenders"].items() if name.startswith(f"{schedule}, ")}
            chunks, slots = (list(dict.fromkeys(name.split(", ")[at] for name in found)) for at in (1, 2))
            yield from table(
                (f"{schedule}, T={row['steps']:,}", *slots),
                ((chunk, *(_gridded(found.get(f"{schedule}, {chunk}, {k}")) for k in slots)) for chunk in chunks),
            )

    return lines


def _gridded(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    local, remote = (megabytes(found[f"{where}_peak_bytes"]) for where in ("local", "remote"))
    return f"{local}, {found['median_ratio']:.2f}; {remote}"


def chunked(result: Result) -> Iterator[str]:
    """Remote checkpoints by the length of their chunks."""
    for row in rows_of(result, None, "chunk"):
        yield from table(
            ("chunk, steps", "local peak", "predicted", "remote peak", "time, plain BPTT = 1"),
            (
                (
                    name.partition("C=")[2],
                    *(
                        megabytes(each[key])
                        for key in ("local_peak_bytes", "predicted_peak_bytes", "remote_peak_bytes")
                    ),
                    f"{each['median_ratio']:.2f}",
                )
                for name, each in row["contenders"].items()
                if name != EAGER
            ),
        )


def predicted(result: Result) -> Iterator[str]:
    """Predicted over measured peaks and seconds, and the errors of gradients, of all points of a part."""
    body = []
    for name, part in result.items():
        ours = [each for row in part["rows"] for who, each in row["contenders"].items() if who != EAGER]
        peaks = [each["predicted_peak_bytes"] / each["local_peak_bytes"] for each in ours]
        times = [each["predicted_s"] / each["median_s"] for each in ours]
        error = max(each["relative_error"] for each in ours)
        middle = [f"{statistics.median(each):.2f} ({_span(each)})" for each in (peaks, times)]
        body.append((name, str(len(ours)), *middle, f"{error:.0e}"))
    yield from table(
        ("part", "points", "predicted / measured peak", "predicted / measured seconds", "largest gradient error"), body
    )


def verdicts(result: Result) -> Iterator[str]:
    """What is claimed, what was found, and whether it holds."""
    yield from table(("claim", "against", "found", "holds"), claims(result))


TABLES: Mapping[str, Callable[[Result], Iterator[str]]] = {
    "where": where,
    "verdicts": verdicts,
    "recurrent": by_length("recurrent"),
    "feedforward": by_length("feed-forward"),
    "tenfold": ten,
    "width": by_width("recurrent"),
    "widthforward": by_width("feed-forward"),
    "fourfold": four,
    "overhead": overhead,
    "hierarchical": gridded("hierarchical"),
    "double": gridded("double"),
    "chunk": chunked,
    "predicted": predicted,
}
