"""What each scheme costs, as formulas: bytes per tier, steps, transfers and seconds.

The schemes are those of Bencheikh, Finkbeiner, Neftci (2024), arXiv 2412.11810. A formula is exact, with its ceilings:
it gives what the verifier counts (``reroll.program.tally``; the running carry and its gradient are not counted) for
every T, C, K and k. Beside it stands the smooth form without rounding, from which the best chunk and slots are derived.

Two models of time. Blocking is the paper's: transfers wait for segments and segments for transfers. Overlapped: one
stream computes, one writes, one reads. Blocks are written as they are made, the first read starts after the turn, and
every other block is read while the chunk behind it is reversed (the pass ``prefetch``). The formula is the makespan
of these three streams, so it holds what cannot overlap: the first read, and the work of the chunk reversed last.

The letters of the formulas, what they mean, and the abbreviations that formulas use stand first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray
from sympy import Expr, Integer, Max, Min, Symbol, ceiling

from reroll.errors import OptionError, nearest

FORMULATED = ("store_all", "standard", "remote", "hierarchical", "double")
"""The schedules that have formulas."""
ZERO, ONE = Integer(0), Integer(1)
most, least = partial(Max, evaluate=False), partial(Min, evaluate=False)  # sympy would compare all pairs: 0.1 s each


LEGEND: Mapping[str, tuple[str, str]] = {
    "steps": ("T", "steps"),
    "chunk": ("C", "steps of a chunk"),
    "slots": ("K", "local carries of a chunk"),
    "segment": ("k", "steps of a segment; chunks and sub-chunks are whole segments"),
    "carry": ("s", "bytes of a carry as it is kept locally"),
    "packed": ("p", "bytes of a carry in a block: written, kept remotely, read"),
    "tape": ("a", "bytes of one taped step"),
    "forward": ("f", "seconds of a segment that keeps no tape"),
    "taping": ("h", "seconds of a segment that keeps its tape"),
    "backward": ("b", "seconds of a segment reversed"),
    "write": ("w", "bytes written in a second"),
    "read": ("r", "bytes read in a second"),
    "latency": ("l", "seconds of each transfer besides"),
}
"""The numbers of a formula by name: their letters and meanings. A short last segment counts as a whole one's time."""
DEFAULTS: Mapping[str, float] = {
    **dict.fromkeys(("chunk", "slots", "segment", "carry", "tape"), 1.0),
    **dict.fromkeys(("forward", "taping", "backward", "latency"), 0.0),
    **dict.fromkeys(("write", "read"), np.inf),
}
"""Of numbers that are not given: units for sizes, no seconds. ``packed`` is as ``carry``, ``steps`` has none."""
SYMBOLS: Mapping[str, Symbol] = {name: Symbol(letter, positive=True) for name, (letter, _) in LEGEND.items()}
T, C, K, k, s, p, a, f, h, b, w, r, l = SYMBOLS.values()  # noqa: E741  # the latency
N, F, L, n, M, Q, S = (Symbol(letter, positive=True) for letter in ("N", "F", "L", "n", "M", "Q", "S"))
SHORT: Mapping[Symbol, tuple[Expr, str]] = {
    S: (ceiling(T / k), "segments"),
    F: (Min(T, k * ceiling(C / k)), "steps of a chunk but the last"),
    N: (ceiling(T / F), "chunks"),
    L: (T - (N - 1) * F, "steps of the last chunk"),
    n: (k * ceiling(ceiling(C / k) / K), "steps of a sub-chunk but the last of its chunk"),
    M: (ceiling(F / n), "sub-chunks of a chunk but the last"),
    Q: (ceiling(L / n), "sub-chunks of the last chunk"),
}
"""Abbreviations, each of the letters and of those before it. A chunk that is the only one is described by both."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a formula, as arrays of one shape; the fields are those of ``Formula``."""

    local_peak: NDArray[np.float64]
    prefetched_peak: NDArray[np.float64]
    remote_peak: NDArray[np.float64]
    rerun: NDArray[np.float64]
    writes: NDArray[np.float64]
    reads: NDArray[np.float64]
    carries: NDArray[np.float64]
    blocking: NDArray[np.float64]
    overlapped: NDArray[np.float64]


COUNTED = tuple(each.name for each in fields(Figures))


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """What a scheme costs, in the letters of ``LEGEND`` and the abbreviations of ``SHORT``; ``full`` expands these.

    local_peak, remote_peak: bytes; prefetched_peak: the local one after the pass ``prefetch``, which overlapping needs.
    rerun: steps that run forward again. writes, reads: transfers; carries: how many are written, and as many are read.
    blocking, overlapped: seconds of a training step.
    smooth_peak, smooth_remote: bytes without rounding, in T, C, K, s, p and a.
    hiding: from which C on, without rounding, reversing a chunk takes as long as reading a block; None without blocks.
    """

    name: str
    summary: str
    local_peak: Expr
    prefetched_peak: Expr
    remote_peak: Expr
    rerun: Expr
    writes: Expr
    reads: Expr
    carries: Expr
    blocking: Expr
    overlapped: Expr
    smooth_peak: Expr
    smooth_remote: Expr = ZERO
    hiding: Expr | None = None

    @property
    def best(self) -> Mapping[Symbol, Expr]:
        """The chunk and the slots of least local peak, derived from the smooth form.

        Remotely kept, the local peak alone falls with C without end: C is where the tape of a whole chunk takes as many
        bytes as the starts of all chunks, and K is best for any C.
        """
        return _best(self)

    @property
    def best_peak(self) -> Expr:
        """The smooth local peak at the best chunk and slots."""
        found = self.smooth_peak.subs(K, self.best.get(K, K)).subs(C, self.best.get(C, C))
        return sympy.simplify(found)

    def full(self, name: str) -> Expr:
        """The expression of a field in the letters of ``LEGEND`` alone."""
        expr = getattr(self, name)
        for short, (meaning, _) in reversed([*SHORT.items()]):
            expr = expr.subs(short, meaning)
        return expr

    def evaluate(self, **numbers: ArrayLike) -> Figures:
        """The figures for numbers, or arrays of them that broadcast, by the names of ``LEGEND``.

        Those that are not given are ``DEFAULTS``. Counts are exact up to 2^53. Raises OptionError for an unknown name,
        and without ``steps``.
        """
        for name in numbers:
            if name not in LEGEND:
                raise OptionError(f"A formula has no number {name!r}. Its numbers are {', '.join(LEGEND)}.")
        if "steps" not in numbers:
            raise OptionError("A formula was evaluated without steps. Give steps=, the number of steps T.")
        given = {**DEFAULTS, "packed": numbers.get("carry", DEFAULTS["carry"]), **numbers}
        arrays = np.broadcast_arrays(*(np.asarray(given[name], dtype=np.float64) for name in LEGEND))
        found = (np.asarray(each, dtype=np.float64) for each in _compiled(self)(*arrays))
        return Figures(*(np.broadcast_to(each, arrays[0].shape) for each in found))

    def describe(self) -> str:
        """The formulas as text, one a line, and what their letters mean."""
        exprs = {name: getattr(self, name) for name in COUNTED if getattr(self, name) != 0}
        for name, same in (("prefetched_peak", "local_peak"), ("overlapped", "blocking")):
            if exprs[name] == exprs[same]:
                del exprs[name]
        exprs["smooth peak"] = self.smooth_peak
        exprs |= {f"best {letter}": under_one_root(best) for letter, best in self.best.items()}
        exprs |= {"best peak": under_one_root(self.best_peak)} if self.best else {}
        exprs |= {"reads hide from C =": self.hiding} if self.hiding is not None else {}
        lines = [f"{name.replace('_', ' '):<20}{expr}" for name, expr in exprs.items()]
        used = set[Symbol]().union(*(expr.free_symbols for expr in exprs.values()))
        shorts: list[str] = []
        for short, (meaning, text) in reversed([*SHORT.items()]):
            if short in used:
                used |= meaning.free_symbols
                shorts.insert(0, f"{short} = {meaning}: {text}")
        letters = [f"{letter}: {text}" for name, (letter, text) in LEGEND.items() if SYMBOLS[name] in used]
        return "\n".join([f"{self.name}: {self.summary}", *(f"  {line}" for line in (*lines, *shorts, *letters))])


def under_one_root(expr: Expr) -> Expr:
    """``sqrt(T s / a)`` where sympy writes a product of roots."""
    number, rest = expr.as_coeff_Mul()
    powers = [factor.as_base_exp()[1] for factor in sympy.Mul.make_args(rest)]
    degree = math.lcm(*(power.q for power in powers))
    root = sympy.Pow(rest**degree, sympy.Rational(1, degree), evaluate=False)
    if degree == 1:
        return expr
    return root if number == 1 else sympy.Mul(number, root, evaluate=False)


@cache
def _compiled(formula: Formula) -> Callable[..., Any]:
    """The figures as a function of arrays, in the order of ``LEGEND``; each abbreviation is computed once."""
    shorts = [(short, meaning) for short, (meaning, _) in SHORT.items()]
    compiled: Callable[..., Any] = sympy.lambdify(
        list(SYMBOLS.values()),
        [getattr(formula, name) for name in COUNTED],
        modules="numpy",
        cse=lambda exprs: (shorts, exprs),
    )
    return compiled


@cache
def _best(formula: Formula) -> Mapping[Symbol, Expr]:
    peak, best = formula.smooth_peak, dict[Symbol, Expr]()
    if K in peak.free_symbols:
        (best[K],) = sympy.solve(sympy.diff(peak, K), K)
        peak = peak.subs(K, best[K])
    if formula.smooth_remote != 0:
        (best[C],) = sympy.solve(C * a - T * p / C, C)
    elif C in peak.free_symbols:
        (best[C],) = sympy.solve(sympy.diff(peak, C), C)
        best = {letter: sympy.simplify(expr.subs(C, best[C])) for letter, expr in best.items()}
    return dict(reversed(best.items()))


def _pieces(steps: Expr, subs: Expr, carry: Expr, held: int) -> Expr:
    """The peak while a chunk of ``steps`` is reversed by ``subs`` sub-chunks, of which ``held`` carries do not count.

    While a sub-chunk is taped its own carry is held, and those before it. The last one may be short, so the peak may be
    at the one before.
    """
    last = (subs - held) * carry + (steps - (subs - 1) * n) * a
    return most(last, (subs - 1 - held) * carry + least(n, steps) * a)


def _store_all() -> Formula:
    moved, seconds = (ZERO, ZERO, ZERO), S * (h + b)
    summary = "all steps are taped, none runs again"
    return Formula("store_all", summary, T * a, T * a, ZERO, ZERO, *moved, seconds, seconds, T * a)


def _local(name: str, summary: str, runs: int, held: tuple[Expr, Expr], smooth: Expr) -> Formula:
    """All carries are local. ``held``: bytes beside the starts while a chunk is reversed, and while the last one is.

    Of the starts those of chunks that are reversed already are gone. ``runs``: forwards of all steps without a tape.
    """
    full, last = held
    peak = most(N * s + last, (N - 1) * s + full)
    moved, seconds = (ZERO, ZERO, ZERO), S * (runs * f + h + b)
    return Formula(name, summary, peak, peak, ZERO, runs * T, *moved, seconds, seconds, T / C * s + smooth)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The carries in the block of each chunk, of the last chunk, and without rounding."""

    each: Expr = ONE
    last: Expr = ONE
    smooth: Expr = ONE

    @property
    def carries(self) -> Expr:
        """Of all blocks."""
        return (N - 1) * self.each + self.last


def _remote(name: str, summary: str, runs: int, held: tuple[Expr, Expr], smooth: Expr, blocks: _Blocks) -> Formula:
    """Carries go to the tier. ``held``: bytes while a chunk is reversed, its block's included, and while the last is.

    A block of several carries is gathered by local saves; of one, it is written from the register.
    """
    full, last = held
    gathered = [] if blocks.each == 1 else [blocks.each * s * least(1, blocks.each - 1)]
    two, three = least(1, N - 1), least(1, most(0, N - 2))
    work, block = (runs - 1) * f + h + b, blocks.each * p
    return Formula(
        name=name,
        summary=summary,
        local_peak=most(full, *gathered) if gathered else full,
        prefetched_peak=most(full, *gathered, two * (last + block), three * (full + block)),
        remote_peak=blocks.carries * p,
        rerun=runs * T,
        writes=N,
        reads=N,
        carries=blocks.carries,
        blocking=S * (f + work) + 2 * N * l + blocks.carries * (p / w + p / r),
        overlapped=_run(blocks) + _reversed(work, blocks),
        smooth_peak=smooth,
        smooth_remote=T / C * blocks.smooth * p,
        hiding=k * (l + blocks.smooth * p / r) / work,
    )


def _run(blocks: _Blocks) -> Expr:
    """Seconds until the turn, or the last write. Blocks are written one by one, each when its last carry is made."""
    each, last = l + blocks.each * p / w, l + blocks.last * p / w
    ready, last_ready = ((count - 1) * n / k * f for count in (blocks.each, blocks.last))
    # Block i is followed by the writes of all later ones; of i = 0 to N - 2 an end is the latest, i = N - 1 is apart.
    ends = [S * f, ready + (N - 1) * each + last, (N - 1) * F / k * f + last_ready + last]
    if blocks.each != 1:
        i = most(0, N - 2)
        ends.append(i * F / k * f + ready + (N - 1 - i) * each + last)
    return most(*ends)


def _reversed(work: Expr, blocks: _Blocks) -> Expr:
    """Seconds from the turn on, where a segment is reversed in ``work`` and each block is read one chunk ahead."""
    full, last = ceiling(F / k) * work, ceiling(L / k) * work
    each, first = l + blocks.each * p / r, l + blocks.last * p / r
    return first + least(1, N - 1) * (most(last, each) + (N - 2) * most(full, each)) + full


def _formulas() -> Iterator[Formula]:
    """All of them; ``smooth`` is what a chunk holds without rounding."""
    inner = _pieces(F, M, s, 1), _pieces(L, Q, s, 1)
    smooth = K * s + C * a / K
    yield _store_all()
    yield _local("standard", "a local carry of each chunk, the tape of one", 1, (F * a, L * a), C * a)
    outer = p + F * a, p + L * a
    yield _remote("remote", "a remote carry of each chunk, the tape of one", 1, outer, p + C * a, _Blocks())
    summary = "K remote carries of each chunk as one block, the tape of a sub-chunk"
    held = _pieces(F, M, p, 0), _pieces(L, Q, p, 0)
    yield _remote("hierarchical", summary, 1, held, K * p + C * a / K, _Blocks(M, Q, K))
    summary = "a remote carry of each chunk, K local ones of one chunk, the tape of a sub-chunk"
    yield _remote("double", summary, 2, (p + inner[0], p + inner[1]), smooth, _Blocks())
    summary = "a local carry of each chunk, K of one chunk, the tape of a sub-chunk"
    yield _local("double, local", summary, 2, inner, smooth)


@cache
def _known() -> Mapping[str, Formula]:
    return {each.name: each for each in _formulas()}


def formula(scheme: str, tier: str = "remote") -> Formula:
    """The formula of a scheme; of ``double`` with ``tier="local"`` that of both levels on the device.

    Raises OptionError for an unknown scheme, naming the nearest.
    """
    known = _known()
    name = "double, local" if (scheme, tier) == ("double", "local") else scheme
    if name not in known:
        raise OptionError(f"There is no formula of {scheme!r}. {nearest(str(scheme), tuple(known))}")
    return known[name]
