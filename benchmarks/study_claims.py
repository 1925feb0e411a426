"""What the paper's abstract claims, put to the numbers of ``study.py``.

"training on sequences over 10 times longer or 4 times larger networks than previously feasible, with only marginal time
overhead", and that it "emerges as the most effective method, optimizing the use of local memory resources" (arXiv
2412.11810, abstract), of Double Checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from contenders import EAGER

DOUBLE, ALL_KEPT = "double (disk)", "store_all"
MARGINAL = 1.1  # what is called marginal here: a tenth more time
Result = dict[str, Any]


def rows_of(result: Result, kind: str | None, *parts: str) -> list[Result]:
    """The rows of parts, those of one kind of network or of all."""
    rows = [row for part in parts for row in result.get(part, {}).get("rows", [])]
    return [row for row in rows if kind in (None, row["network"])]


def peak(row: Result, name: str) -> float | None:
    """The local peak of a contender in bytes, if it was measured."""
    found: float | None = row["contenders"].get(name, {}).get("local_peak_bytes")
    return found


def tenfold(result: Result) -> list[tuple[Result, Result]]:
    """Rows of a setting, and of ten times its length."""
    rows = rows_of(result, None, "settings", "length", "tenfold")
    return [
        (short, long)
        for short in rows
        for long in rows
        if long["steps"] == 10 * short["steps"] and _same(short, long, "network", "batch", "neurons")
        if {DOUBLE, "standard"} <= set(long["contenders"])
    ]


def fourfold(result: Result) -> list[tuple[Result, Result]]:
    """Rows of a width, and of four times that width."""
    rows = rows_of(result, None, "width")
    return [
        (narrow, wide)
        for narrow in rows
        for wide in rows
        if wide["neurons"] == 4 * narrow["neurons"] and _same(narrow, wide, "network", "batch", "steps")
        if {DOUBLE, ALL_KEPT} <= set(wide["contenders"])
    ]


def _same(one: Result, other: Result, *keys: str) -> bool:
    return all(one[key] == other[key] for key in keys)


def reached(rows: Sequence[Result], key: str, name: str, budget_of: str, at: int) -> str:
    """The largest ``key`` at which a contender stays within the peak that ``budget_of`` has where ``key`` is ``at``.

    Between measured points by a power law; where all stay within, "over" the largest one measured.
    """
    budget = next((peak(row, budget_of) for row in rows if row[key] == at), None)
    ladder = sorted((row[key], held) for row in rows if (held := peak(row, name)) is not None)
    if budget is None or not ladder:
        return "-"
    if ladder[-1][1] <= budget:
        return f"over {ladder[-1][0]:,}"
    for (low, below), (high, above) in pairwise(ladder):
        if below <= budget < above:
            share = math.log(budget / below) / math.log(above / below)
            return f"{low * (high / low) ** share:,.0f}"
    return f"under {ladder[0][0]:,}"


def claims(result: Result) -> Iterator[tuple[str, str, str, str]]:
    """(claim, against what, what was found, whether it holds)."""
    for kept, of in ((EAGER, "plain BPTT"), (ALL_KEPT, "`store_all` (same compiled segments)")):
        longer = [(peak(short, kept), peak(long, DOUBLE)) for short, long in tenfold(result)]
        yield _fits("ten times the length in no more memory", of, longer)
        larger = [(peak(narrow, kept), peak(wide, DOUBLE)) for narrow, wide in fourfold(result)]
        yield _fits("four times the width in no more memory", of, larger)
        yield _marginal(of, _overheads(result, kept))
    yield _least(rows_of(result, None, "settings", "length", "width"))


def _fits(claim: str, of: str, pairs: list[tuple[float | None, float | None]]) -> tuple[str, str, str, str]:
    factors = sorted(here / there for there, here in pairs if there and here)
    if not factors:
        return claim, of, "not measured", "-"
    found = f"{factors[0]:.2f} to {factors[-1]:.2f} of its memory"
    return claim, of, found, _of(sum(factor <= 1 for factor in factors), len(factors))


def _overheads(result: Result, kept: str) -> list[float]:
    """Time of double with disk relative to another contender's, wherever all schedules were measured."""
    found = []
    for row in rows_of(result, None, "settings", "length", "width"):
        times = {name: each["median_s"] for name, each in row["contenders"].items()}
        if {DOUBLE, kept} <= set(times):
            found.append(times[DOUBLE] / times[kept])
    return found


def _marginal(of: str, overheads: list[float]) -> tuple[str, str, str, str]:
    claim = f"at most {MARGINAL - 1:.0%} more time"
    if not overheads:
        return claim, of, "not measured", "-"
    found = f"{min(overheads):.2f} to {max(overheads):.2f} of its time"
    return claim, of, found, _of(sum(each <= MARGINAL for each in overheads), len(overheads))


def _least(rows: Sequence[Result]) -> tuple[str, str, str, str]:
    """Whether double with disk has the least local peak of all contenders."""
    claim, factors = ("the least local peak", "all others"), []
    for row in rows:
        others = [held for name in row["contenders"] if name != DOUBLE and (held := peak(row, name)) is not None]
        if (own := peak(row, DOUBLE)) is not None:
            factors.append(own / min(others))
    if not factors:
        return *claim, "not measured", "-"
    met = sum(factor <= 1 for factor in factors)
    return *claim, f"{min(factors):.2f} to {max(factors):.2f} of the next", _of(met, len(factors))


def _of(met: int, all_of: int) -> str:
    return "yes" if met == all_of else "no" if not met else f"at {met} of {all_of} points"
