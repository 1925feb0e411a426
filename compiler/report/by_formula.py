"""What the formulas say of a plan: peaks, steps, seconds and the best numbers, in letters, and with its numbers.

Beside each stands what was counted for the plan: the verifier's peaks and steps, the seconds of its trace, its chunk
and slots. Formulas count carries and tapes alone, and a short last segment as its share of a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import sympy
from sympy import Expr, ceiling

from reroll.formulas import (
    FORMULATED,
    LEGEND,
    SYMBOLS,
    ZERO,
    C,
    F,
    Figures,
    Formula,
    K,
    L,
    M,
    N,
    Q,
    S,
    T,
    formula,
    k,
    n,
    under_one_root,
)
from reroll.program.tally import count
from reroll.schedules.named import optimal
from reroll.schedules.optimal.revolve import least_extra, most_runs
from reroll.words.units import nbytes_text, seconds_text

if TYPE_CHECKING:
    from reroll.report.report import Loop

_SMOOTH: Mapping[sympy.Symbol, Expr] = {S: T / k, N: T / C, F: C, L: C, n: C / K, M: K, Q: K}
_RATES = ("write", "read")
_SECONDS = ("forward", "taping", "backward", "latency")
_BYTES = ("carry", "packed", "tape")
_KINDS = ("about", "exactly", "here")


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of a plan: the formula as ``text``, its number ``smooth`` without rounding and ``exact`` with it, and
    what was ``counted``, in ``unit`` ("bytes", "seconds", "steps", "slots"). None is what is not known, or not said."""

    name: str
    text: str
    unit: str
    smooth: float | None = None
    exact: float | None = None
    counted: float | None = None

    def shown(self, which: str) -> str:
        """One of the three numbers with its unit."""
        value = getattr(self, which)
        if value is None:
            return ""
        if self.unit in ("bytes", "seconds"):
            return nbytes_text(round(value)) if self.unit == "bytes" else seconds_text(value)
        return f"{value:,.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class ByFormula:
    """The figures of a plan by their formulas; ``letters`` by name with their numbers; ``note``: what else holds."""

    lines: tuple[Line, ...]
    letters: Mapping[str, float]
    note: str

    def rows(self) -> list[list[str]]:
        """Of each line its name, its formula and its three numbers."""
        return [[line.name, line.text, *map(line.shown, ("smooth", "exact", "counted"))] for line in self.lines]

    def __str__(self) -> str:
        told = []
        for name, letters, *numbers in self.rows():
            given = [f"{what} {number}" for what, number in zip(_KINDS, numbers, strict=True) if number]
            told.append(f"{name}: {letters} = {', '.join(given)}" if given else f"{name}: {letters}")
        return "\n".join([*told, self.text()])

    def text(self) -> str:
        """The letters with their numbers ("steps T = 19, chunk C = 6"), and the note."""
        letters = [f"{name} {LEGEND[name][0]} = {_amount(name, value)}" for name, value in self.letters.items()]
        return " ".join([*([f"{', '.join(letters)}."] if letters else []), self.note])


def by_formula(loop: Loop) -> ByFormula:
    """What formulas say of the plan of a recurrence. Without a formula of its schedule: what holds instead."""
    problem, name = loop.choice.problem, loop.choice.schedule
    if name not in FORMULATED:
        return _without(loop)
    found = formula(name, problem.tier)
    numbers: dict[str, float] = {"steps": problem.steps, "chunk": problem.chunk or 1, "slots": problem.slots or 1}
    numbers |= {"segment": problem.segment, "carry": problem.carry, "packed": problem.carry}
    numbers["tape"] = problem.tape / problem.segment
    if loop.costs is not None:
        numbers |= loop.costs.numbers(problem.segment, problem.tier if found.smooth_remote != ZERO else None)
    figures = found.evaluate(**numbers)
    exprs = dict(_exprs(found, loop))
    values = {SYMBOLS[each]: value for each, value in numbers.items()}
    known = {each: expr.subs(values) for each, expr in exprs.items()}
    exact, counted = _exact(figures, loop), _counted(loop, found)
    lines = [
        Line(
            each,
            str(under_one_root(expr)),
            _unit(each),
            float(known[each]) if known[each].is_number else None,
            exact.get(each) if known[each].is_number else None,
            counted.get(each),
        )
        for each, expr in exprs.items()
    ]
    used = set[sympy.Symbol]().union(*(expr.free_symbols for expr in exprs.values()))
    letters = {each: value for each, value in numbers.items() if SYMBOLS[each] in used}
    return ByFormula(tuple(lines), letters, _on_top(loop))


def _exprs(found: Formula, loop: Loop) -> Iterator[tuple[str, Expr]]:
    """The formulas without rounding, by what they are of."""
    yield "local peak", found.smooth_peak
    if found.smooth_remote != ZERO:
        yield f"{loop.choice.problem.tier} peak", found.smooth_remote
    if found.rerun != ZERO:
        yield "steps re-run", found.rerun
    seconds = found.overlapped if loop.costs and loop.costs.overlapped else found.blocking
    alike = seconds.subs(Q, M).subs((N - 1) * M + M, N * M)
    yield "time", alike.subs(_SMOOTH).replace(ceiling, lambda inner: inner)
    for letter, best in found.best.items():
        yield f"best {letter}", best
    if found.best:
        yield "peak with best", found.best_peak


def _unit(name: str) -> str:
    if "peak" in name:
        return "bytes"
    return {"time": "seconds", "best K": "slots"}.get(name, "steps")


def _exact(figures: Figures, loop: Loop) -> dict[str, float]:
    peak = figures.prefetched_peak if loop.prefetched else figures.local_peak
    seconds = figures.overlapped if loop.costs and loop.costs.overlapped else figures.blocking
    found = {"local peak": peak, f"{loop.choice.problem.tier} peak": figures.remote_peak}
    found |= {"steps re-run": figures.rerun, "time": seconds}
    return {name: float(value) for name, value in found.items()}


def _counted(loop: Loop, found: Formula) -> dict[str, float]:
    """What the report says elsewhere, or the plan uses."""
    problem, tally = loop.choice.problem, loop.tally
    with_first = count(loop.program, replace(loop.needs.sizes, first=None))  # as the paper counts
    counted: dict[str, float] = {"local peak": with_first.local_peak, "steps re-run": tally.reforward_steps}
    counted |= {f"{tier} peak": nbytes for tier, nbytes in tally.tier_peaks.items()}
    counted |= {"best C": problem.chunk or 1} if C in found.best else {}
    counted |= {"best K": problem.slots or 1} if K in found.best else {}
    return counted | ({"time": loop.trace().seconds} if loop.costs else {})


def _on_top(loop: Loop) -> str:
    problem = loop.choice.problem
    scratch, around = nbytes_text(loop.prediction.most.scratch), nbytes_text(loop.outer_bytes)
    short = " They take the short last segment for as slow as a whole one." * bool(problem.steps % problem.segment)
    above = f"{scratch} for the running segment and {around} around it come on top."
    return f"Formulas count carries and tapes: {above}{short}"


def _without(loop: Loop) -> ByFormula:
    """What holds of schedules that have no formula."""
    name, problem = loop.choice.schedule, loop.choice.problem
    if name not in ("revolve", "hrevolve"):
        return ByFormula((), {}, f"There is no formula of {name!r}: its peaks, steps and transfers were counted.")
    if name == "revolve" and problem.slots is not None:
        return _binomial(loop, problem.slots)
    found = optimal(name, problem)
    if found is None:
        return ByFormula((), {}, "All segments are taped, so no step runs again.")
    where = "over two tiers" if name == "hrevolve" else "in bytes, which carries and tapes share"
    what = "runs of a segment, transfers included," if name == "hrevolve" else "further runs of a segment,"
    note = (
        f"There is no closed form of {name!r} {where}: it was found by search. It costs {found.extra:,.6g} {what} and "
        f"no schedule in the same memory costs less than {found.bound:,.6g}."
    )
    return ByFormula((), {}, note)


def _binomial(loop: Loop, slots: int) -> ByFormula:
    """Griewank and Walther (2000), theorem 1: l segments in s slots cost r l - C(s + r, s + 1) runs again."""
    problem = loop.choice.problem
    again = problem.segment * least_extra(problem.segments, slots)
    text = "k*(R*S - binomial(K + R, K + 1))"
    line = Line("steps re-run", text, "steps", None, again, loop.tally.reforward_steps)
    note = (
        f"S = {problem.segments:,} segments, and R = {most_runs(problem.segments, slots)} is the least number with "
        f"binomial(K + R, K) >= S (Griewank and Walther 2000). {_on_top(loop)}"
    )
    return ByFormula((line,), {"steps": problem.steps, "slots": slots, "segment": problem.segment}, note)


def _amount(name: str, value: float) -> str:
    if name in _SECONDS:
        return seconds_text(value)
    if name in _BYTES or name in _RATES:
        return nbytes_text(round(value)) + ("/s" if name in _RATES else "")
    return f"{value:,}"
