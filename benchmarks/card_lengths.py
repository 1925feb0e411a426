"""The longest sequences of the recurrent network: within a budget of local bytes, and within the whole device.

What was measured at two lengths is extended to the length that would just fit, and one training step there shows that
it does; a second one, shorter, if it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from card_contenders import entrant
from card_measure import NoRoomError, expected_seconds, planned
from card_points import LENGTHS, LONG, QUICK_LENGTH, RECURRENT, Point
from card_session import Result, Session

BUDGET, QUICK_BUDGET = 2**30, 2**17  # bytes
_CLOSE = 0.97  # of the length that would just fit
_MOST = 2**20  # times a measured length: beyond, nothing is said


@dataclass(frozen=True)
class Limit:
    """``nbytes`` for the local peak, and for inputs of ``per_step`` bytes."""

    nbytes: int
    per_step: int = 0

    def allows(self, steps: int, peak: float) -> bool:
        """Whether it all fits."""
        return peak + steps * self.per_step <= self.nbytes


def longest(todo: Sequence[Point], session: Session) -> None:
    """Fill ``lengths`` of the result, for the contenders of the longest sequences."""
    found = [point for point in todo if point.network == RECURRENT]
    if not found:
        return
    point = found[0]
    quick = point.lowering == "eager"
    one = replace(point, steps=1).inputs_on(session.meter.device)
    limits = {
        "budget": Limit(QUICK_BUDGET if quick else BUDGET),
        "device": Limit(session.meter.room() or 0, one.nbytes),
    }
    del one
    for where, limit in limits.items():
        kept = session.result["lengths"].setdefault(where, {"limit_bytes": limit.nbytes, "contenders": {}})
        for name in (name for name in LONG if name in point.contenders):
            entry = kept["contenders"].setdefault(name, {})
            if "tried" not in entry:
                _fill(entry, name, where, limit, replace(point, rounds=0), session)


def _fill(entry: Result, name: str, where: str, limit: Limit, point: Point, session: Session) -> None:
    peaks = measured_peaks(session.result, name)
    if len(peaks) < 2:
        session.leave_out(f"longest sequence, {where}, {name}", "its peak was measured at fewer than two lengths")
        return
    entry.update(extended(peaks, limit), tried=[])
    most = QUICK_LENGTH if point.lowering == "eager" else LENGTHS[-1]
    goal = entry["extended_steps"] or most
    for _ in range(2):
        steps = max(int(_CLOSE * goal) // 8 * 8, 8) if goal < most else most
        at = replace(point, steps=steps)
        expected = expected_seconds(at, name, session)
        what = f"longest sequence, {where}, {name}, T={steps:,}"
        known = entry["steps"] is not None and steps <= 1.05 * entry["steps"]
        if known or session.left <= 0:
            break
        tried: Result = {"steps": steps}
        if not session.attempt(tried, what, partial(_run, name, at, session), expected):
            del entry["tried"]  # the next run does it
            break
        entry["tried"].append({"steps": steps, **tried})
        peak = tried.get("local_peak_bytes")
        if peak is not None and limit.allows(steps, peak):
            entry["steps"] = steps
            break
        goal = steps * (min(limit.nbytes / (peak + steps * limit.per_step), 1) if peak else 0.8)
    session.save()


def _run(name: str, point: Point, session: Session) -> Result:
    """One training step at a length that was not run before."""
    try:
        found = entrant(name, point, point.inputs_on(session.meter.device))
        planned(found, session)
        cost = session.meter.cost(found.step, found.network)
    except (NoRoomError, torch.OutOfMemoryError) as error:
        return {"does_not_fit": str(error)}
    return {"local_peak_bytes": cost.local_peak_bytes, "seconds": cost.seconds}


def measured_peaks(result: Result, name: str) -> dict[int, int]:
    """Local peaks of a contender by the length of the recurrent network's sequence."""
    rows = (row for row in result["points"].values() if row["network"] == RECURRENT)
    found = {row["steps"]: row["contenders"].get(name, {}).get("local_peak_bytes") for row in rows}
    return {steps: peak for steps, peak in sorted(found.items()) if peak}


def extended(peaks: Mapping[int, int], limit: Limit) -> Result:
    """The longest measured length that fits (None: none does), and the one that the peaks extend to (None: no end).

    Peaks are taken to be a power of the length, the one through the two that are nearest to the limit.
    """
    near = sorted(peaks, key=lambda steps: abs(math.log((peaks[steps] + steps * limit.per_step) / limit.nbytes)))
    first, last = sorted(near[:2])
    power = min(max(math.log(peaks[last] / peaks[first]) / math.log(last / first), 0.0), 1.0)
    low, high = 0, _MOST * last
    while high - low > 1:
        middle = (low + high) // 2
        fits = limit.allows(middle, peaks[last] * (middle / last) ** power)
        low, high = (middle, high) if fits else (low, middle)
    measured = [steps for steps, peak in peaks.items() if limit.allows(steps, peak)]
    end = low if high < _MOST * last else None
    return {"steps": max(measured, default=None), "extended_steps": end, "power": power}
