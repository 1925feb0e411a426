"""The letters of the cost formulas, what they mean, and the abbreviations that formulas use."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from sympy import Expr, Min, Symbol, ceiling

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
