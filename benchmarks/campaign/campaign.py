"""Random programs through both doors, compared with eager in float64 in everything that ``reroll.check`` sees.

    python benchmarks/campaign/campaign.py --seconds 600          # go on where the committed result ended
    python benchmarks/campaign/campaign.py --seed 1234            # one program: its text, and what becomes of it
    python benchmarks/campaign/campaign.py --defects              # judge all defects that were found once more
    python benchmarks/campaign/campaign.py --show

Each seed makes one program, and says through which door it goes and with which options. Seeds never repeat: a run
begins behind the last one of ``results/campaign.json``. What is refused is counted by reason. What is wrong, raises a
raw error or gives no answer is made smaller and kept whole, with the pieces of reroll without which it comes out right
(``blame.py``).
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from blame import blame
from judge import DEFECTS, Verdict, Way, judge
from programs import Program, generate
from record import RESULT, Section, environment, read, write
from rich.console import Console
from rich.table import Table
from shrink import shrink

CHUNK = 10  # programs of one task
SHRINKING = 120.0  # seconds
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": "store_all"},
    {"schedule": "standard", "segment": 2, "chunk": 4},
    {"schedule": "double", "segment": 2, "chunk": 4, "slots": 2, "remote": "host"},
    {"schedule": "double", "segment": 1, "chunk": 3, "slots": 2, "remote": "disk"},
    {"schedule": "hierarchical", "segment": 1, "chunk": 4, "slots": 2},
    {"schedule": "revolve", "segment": 1, "slots": 2, "verify": True},
    {"codec": "none"},
)


def way_of(program: Program) -> Way:
    """The door and the options of a seed. Inductor draws other random numbers than torch."""
    draw = random.Random(f"way of {program.seed}")
    lowering = "inductor" if draw.random() < 0.1 and not program.random else "eager"
    options = {"lowering": lowering, **draw.choice(OPTIONS)}
    return Way("backend" if draw.random() < 0.6 else "compile", tuple(sorted(options.items())))


def judged(seeds: range) -> list[dict[str, Any]]:
    """What becomes of the programs of some seeds; failures are made smaller."""
    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        program = generate(seed)
        way = way_of(program)
        verdict = judge(program, way)
        row = {"seed": seed, "way": str(way), "kind": verdict.kind, "why": verdict.why}
        if verdict.kind in DEFECTS:
            smaller = _smaller(program, way, verdict)
            row["source"] = smaller.source()
            row["right_without"] = blame(verdict, way, partial(judge, smaller))
        rows.append(row)
    return rows


def _smaller(program: Program, way: Way, verdict: Verdict) -> Program:
    if verdict.kind == "no answer":
        return program
    return shrink(program, verdict, lambda each: judge(each, way), SHRINKING)


def run(first: int, seconds: float, workers: int) -> tuple[int, list[dict[str, Any]]]:
    """Judge programs from a seed on for some time. Gives the first seed that is left, and a row for each program."""
    end, rows, seed = time.monotonic() + seconds, list[dict[str, Any]](), first
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=4) as pool:
        waiting = set[Future[list[dict[str, Any]]]]()
        while time.monotonic() < end or waiting:
            while len(waiting) < workers and time.monotonic() < end:
                waiting.add(pool.submit(judged, range(seed, seed + CHUNK)))
                seed += CHUNK
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                rows += each.result()
                for row in rows[-CHUNK:]:
                    if row["kind"] != "equal":
                        print(f"seed {row['seed']}, {row['way']}: {row['kind']}: {row['why']}")
                print(f"{len(rows)} programs: {dict(Counter(row['kind'] for row in rows))}", flush=True)
    return seed, rows


def merged(before: Section, first: int, stop: int, rows: list[dict[str, Any]], command: str) -> Section:
    """The section with one more run."""
    made = {"seeds": [first, stop], "counts": dict(Counter(row["kind"] for row in rows)), **environment(command)}
    reasons: dict[str, Counter[str]] = {"refused": Counter(), "left": Counter()}
    for kind, counter in reasons.items():
        counter.update(before.get("reasons", {}).get(kind, {}))
        counter.update(row["why"] for row in rows if row["kind"] == kind)
    defects = [*before.get("defects", []), *(row for row in rows if row["kind"] in DEFECTS)]
    return {
        "runs": [*before.get("runs", []), made],
        "reasons": {kind: dict(counter.most_common()) for kind, counter in reasons.items()},
        "defects": defects,
    }


def judged_again(before: Section, commit: str) -> Section:
    """The section with what becomes of every defect now; one that is mended says since which commit that is known."""
    defects = []
    for row in before.get("defects", []):
        found = judge(generate(row["seed"]), way_of(generate(row["seed"])))
        mended = {} if found.kind in DEFECTS else {"mended": row.get("mended", commit)}
        defects.append({**{key: value for key, value in row.items() if key != "mended"}, **mended})
    return {**before, "defects": defects}


def show(result: Section, console: Console) -> None:
    """Counts of all runs, reasons, and defects."""
    counts: Counter[str] = Counter()
    for each in result.get("runs", []):
        counts.update(each["counts"])
    table = Table("kind", "programs")
    for kind, count in counts.most_common():
        table.add_row(kind, f"{count:,}")
    console.print(table)
    for kind, found in result.get("reasons", {}).items():
        reasons = Table(kind, "programs")
        for why, count in found.items():
            reasons.add_row(why, str(count))
        console.print(reasons)
    for each in result.get("defects", []):
        now = f"mended, seen at {each['mended']}" if "mended" in each else "OPEN"
        console.print(f"{each['kind']} ({now}): seed {each['seed']}, {each['way']}: {each['why']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--defects", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    given, console = parser.parse_args(), Console()
    before = read(given.out, "programs")
    if given.seed is not None:
        program = generate(given.seed)
        way = way_of(program)
        console.print(program.source(), highlight=False, markup=False)
        verdict = judge(program, way)
        console.print(f"{way}: {verdict}", highlight=False, markup=False)
        if verdict.kind in DEFECTS:
            console.print(f"right without: {', '.join(blame(verdict, way, partial(judge, program))) or 'nothing'}")
    elif given.defects:
        torch.set_num_threads(1)
        found = judged_again(before, environment("")["commit"])
        write(given.out, "programs", found)
        show(found, console)
    elif given.show:
        show(before, console)
    else:
        first = max((each["seeds"][1] for each in before.get("runs", [])), default=0)
        stop, rows = run(first, given.seconds, given.workers)
        command = f"python benchmarks/campaign/campaign.py --seconds {given.seconds:g} --workers {given.workers}"
        result = merged(before, first, stop, rows, command)
        write(given.out, "programs", result)
        show(result, console)


if __name__ == "__main__":
    main()
