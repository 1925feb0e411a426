"""Formulas against the verifier for every T, C and K: ``python benchmarks/formula_counts.py --steps 70 --jobs 2``.

For each scheme and all 1 <= K <= C <= T up to ``--steps`` the program is built and counted, as it is and with reads one
chunk ahead, and its peaks, steps run again, transfers and carries moved are compared with the formula's. Slots
that give the same tree share a program. It takes half an hour of one core at 70, and stops at the first difference.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from multiprocessing import Pool

import numpy as np
from rich.console import Console

from reroll.formulas import formula
from reroll.program import Context, store_all, verify
from reroll.program.registry import run
from reroll.schedules import Problem, tree

SCHEMES = (
    ("store_all", "local"),
    ("standard", "local"),
    ("remote", "disk"),
    ("hierarchical", "disk"),
    ("double", "disk"),
    ("double", "local"),
)
PASSES = "save,recompute,offload"
NAMES = ("local_peak", "prefetched_peak", "remote_peak", "rerun", "writes", "reads", "carries")


@cache
def counts(scheme: str, tier: str, steps: int, chunk: int, sub: int) -> tuple[int, ...]:
    """What the verifier counts, by the order of ``NAMES``, with sub-chunks of ``sub`` steps."""
    root = tree(scheme, Problem(steps, 1, chunk=chunk, slots=-(-chunk // sub), tier=tier))
    plain, ahead = (
        verify(run(passes, store_all(steps, 1), Context(root))) for passes in (PASSES, f"{PASSES},prefetch")
    )
    moved = (plain.reforward_steps, plain.remote_writes, plain.remote_reads, plain.carries_written)
    assert plain.carries_written == plain.carries_read
    return plain.local_peak, ahead.local_peak, plain.remote_peak, *moved


def compare(steps: int) -> int:
    """Compare all schemes at one T. Gives the number of comparisons."""
    compared = 0
    for scheme, tier in SCHEMES:
        nested = scheme in ("hierarchical", "double")
        chunks = range(1, 2 if scheme == "store_all" else steps + 1)
        rows = [(chunk, slots) for chunk in chunks for slots in range(1, chunk + 1 if nested else 2)]
        chunk, slots = np.array(rows).T
        figures = formula(scheme, tier).evaluate(steps=steps, chunk=chunk, slots=slots)
        found = np.stack([getattr(figures, name) for name in NAMES], axis=1)
        for row, (c, k) in zip(found, rows, strict=True):
            expected = counts(scheme, tier, steps, c, -(-c // k) if nested else 1)
            assert tuple(row) == expected, f"{scheme} ({tier}) T={steps} C={c} K={k}: {NAMES} {row} != {expected}"
        compared += len(rows)
    counts.cache_clear()
    return compared


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=70, help="the largest T")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    with Pool(args.jobs) as pool:
        compared = sum(pool.imap_unordered(compare, range(args.steps, 0, -1)))
    took = time.perf_counter() - start
    Console().print(f"{compared:,} combinations of scheme, T, C and K up to T={args.steps}: all equal, {took:.0f} s")
    return compared


if __name__ == "__main__":
    main()
