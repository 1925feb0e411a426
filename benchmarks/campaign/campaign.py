"""Random programs through both doors, compared with eager in float64 in everything that ``reroll.check`` sees.

    python benchmarks/campaign/campaign.py --seconds 600          # go on where the committed result ended
    python benchmarks/campaign/campaign.py --of mutants           # networks of the tests, changed in one place
    python benchmarks/campaign/campaign.py --of stacks            # blocks over depth, one of them odd
    python benchmarks/campaign/campaign.py --of lowered           # programs, all by inductor, in segments of many steps
    python benchmarks/campaign/campaign.py --of sizes             # the same, each with several sizes of the batch
    python benchmarks/campaign/campaign.py --of losses            # programs that end in losses, sums and last rows
    python benchmarks/campaign/campaign.py --of wholes            # programs whose steps read all of a sequence
    python benchmarks/campaign/campaign.py --of updated           # programs that update what was read before in place
    python benchmarks/campaign/campaign.py --of kinds             # held containers, hooks, sizes inside, layouts, ...
    python benchmarks/campaign/campaign.py --of "kinds lowered"   # the same by inductor
    python benchmarks/campaign/campaign.py --of turns             # steps by number, no_grad, maps, states, views, ...
    python benchmarks/campaign/campaign.py --of long              # of turns and kinds, records of which leave runs out
    python benchmarks/campaign/campaign.py --of "at once"         # the same without states, called by two threads
    python benchmarks/campaign/campaign.py --of truncated         # with truncate=k, beside states that are detached
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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from at_once import judge_at_once
from blame import blame
from changed_networks import Mutant, mutant
from judge import DEFECTS, Text, Verdict, Way, judge, judge_calls, judge_mutant, judge_sizes
from kinds import Model, at_length, model
from programs import Program, generate, updated
from record import RESULT, Section, environment, read, write
from rich.console import Console
from rich.table import Table
from shrink import shrink
from stacks import Stack, stack
from truncation import judge_truncated

Row = dict[str, Any]
CHUNK = 40  # programs of one process
SHRINKING = 40.0  # seconds
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


def way_of(seed: int, draws: bool) -> Way:
    """The door and the options of a seed. Inductor draws other random numbers than torch."""
    draw = random.Random(f"way of {seed}")
    lowering = "inductor" if draw.random() < 0.1 and not draws else "eager"
    options = {"lowering": lowering, **draw.choice(OPTIONS)}
    return Way("backend" if draw.random() < 0.6 else "compile", tuple(sorted(options.items())))


def way_lowered(seed: int, draws: bool) -> Way:
    """By inductor, in segments of many steps: what it fuses and where it puts buffers depends on their number."""
    draw = random.Random(f"lowered {seed}")
    options = {"lowering": "eager" if draws else "inductor", "segment": draw.choice((2, 3, 5, 6, 7, 8))}
    options["schedule"] = draw.choice(("standard", "store_all"))
    return Way(draw.choice(("backend", "compile")), tuple(sorted(options.items())))


def way_over_depth(seed: int, draws: bool) -> Way:
    """The door and the options of a seed for loops over depth; every second one has a budget, under which tapes may be
    thin."""
    way = way_of(seed, draws)
    options = dict(way.options)
    if seed % 2:
        part = random.Random(f"budget of {seed}").choice((0.5, 0.7, 0.8, 0.9, 0.95))
        options = {"lowering": options["lowering"], "memory_budget": part, "segment": 1}
    return Way(way.door, tuple(sorted(options.items())))


SEGMENTS: tuple[dict[str, Any], ...] = (
    {"segment": 1},
    {"segment": 2},
    {"schedule": "store_all", "segment": 1},
    {"schedule": "standard", "segment": 1, "chunk": 4},
    {"schedule": "double", "segment": 1, "chunk": 4, "slots": 2, "remote": "host"},
    {"schedule": "revolve", "segment": 1, "slots": 2, "verify": True},
    {},
)
"""Options of which all but the last compile little."""


def way_of_kinds(seed: int, lowering: str) -> Way:
    """The door and the options of a seed."""
    draw = random.Random(f"way of kinds {seed}")
    options = {"lowering": lowering, **draw.choice(SEGMENTS)}
    door = draw.choice(("compile",) * 5 + ("backend",) * 4 + ("compile",))  # in this order for the sake of old seeds
    return Way(door, tuple(sorted(options.items())))


def way_unproved(seed: int, way: Way) -> Way:
    """Every second seed without a proof, which would find what is wrong and raise; the backend comes less often."""
    options = {**dict(way.options), **({"proof": "never"} if seed % 2 else {})}
    door = "compile" if way.door == "backend" and seed % 4 < 2 else way.door
    return Way(door, tuple(sorted(options.items())))


Subject = Program | Mutant | Stack | Model
JUDGES: dict[str, Callable[[Any, Way], Verdict]] = dict.fromkeys(
    ("programs", "lowered", "stacks", "losses", "wholes", "updated"), judge
)
JUDGES |= {"mutants": judge_mutant, "sizes": judge_sizes, "truncated": judge_truncated}
JUDGES |= dict.fromkeys(("kinds", "kinds lowered", "turns", "long"), judge_calls)
JUDGES["at once"] = judge_at_once
_OF_CALLS = ("kinds", "kinds lowered", "turns", "long")


def subject(of: str, seed: int) -> tuple[Subject, Way]:
    """What a seed makes, and the way it goes. Whether a mutant draws random numbers is not known."""
    if of == "mutants":
        return mutant(seed), way_of(seed, draws=True)
    if of == "stacks":
        blocks = stack(seed)
        return blocks, way_over_depth(seed, blocks.random)
    if of == "at once":
        way = way_unproved(seed, way_of_kinds(seed, "eager"))
        return replace(model(seed, way.door, draws=False, turns=True, states=False), way=way.text()), way
    if of == "long":
        way = Way("compile", way_unproved(seed, way_of_kinds(seed, "eager")).options)
        return replace(at_length(model(seed, way.door, turns=seed % 2 == 0)), way=way.text()), way
    if of in _OF_CALLS:
        way = way_of_kinds(seed, "inductor" if of == "kinds lowered" else "eager")
        way = way_unproved(seed, way) if of == "turns" else way
        made = model(seed, way.door, draws=of != "kinds lowered", turns=of == "turns")
        return replace(made, way=way.text()), way
    if of == "updated":
        program = updated(generate(seed))
        return program, way_unproved(seed, way_of(seed, draws=True))  # eager: many are left to torch, as inductor does
    program = generate(seed, losses=of == "losses", wholes=of == "wholes")
    return program, (way_lowered if of in ("lowered", "sizes") else way_of)(seed, program.random)


def judged(of: str, seeds: range) -> list[Row]:
    """What becomes of what some seeds make; failures of programs are made smaller."""
    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        made, way = subject(of, seed)
        verdict = JUDGES[of](made, way)
        row = {"seed": seed, "way": str(way), "kind": verdict.kind, "why": verdict.why}
        if verdict.kind in DEFECTS:
            smaller = _smaller(of, made, way, verdict)
            answers = verdict.kind != "no answer" and of not in _OF_CALLS  # without them each would be waited for
            blamed = blame(verdict, way, partial(JUDGES[of], smaller)) if answers else []
            row |= {**_described(smaller, way), "right_without": blamed}
        rows.append(row)
    return rows


def _described(made: Subject, way: Way) -> Row:
    """All that it takes to judge a defect again."""
    text = {"text": made.text, "name": made.name} if isinstance(made, Mutant) else {}
    return {"source": made.source(), "door": way.door, "options": dict(way.options), **text}


def _again(of: str, row: Row) -> Verdict:
    """What becomes now of a defect that was kept."""
    way = Way(row["door"], tuple(sorted(row["options"].items())))
    if of == "mutants":
        return judge_mutant(Mutant(row["seed"], row["name"], row["text"], row["why"]), way)
    if of == "at once":
        return judge_at_once(Text(row["seed"], row["source"]), way)
    if of in _OF_CALLS:
        return judge_calls(Text(row["seed"], row["source"]), way)
    if of in ("sizes", "truncated"):
        return JUDGES[of](generate(row["seed"]), way)
    return judge(Text(row["seed"], row["source"]), way)


def _smaller(of: str, made: Subject, way: Way, verdict: Verdict) -> Subject:
    if verdict.kind == "no answer" or not isinstance(made, Program | Model):
        return made
    program: Any = made  # of either kind: text that is made smaller line by line
    smaller: Subject = shrink(program, verdict, lambda each: JUDGES[of](each, way), SHRINKING)
    return smaller


def run(of: str, first: int, seconds: float, workers: int) -> Iterator[list[Row]]:
    """Judge programs from a seed on for some time. Gives the rows of each chunk, in order."""
    end, seed = time.monotonic() + seconds, first
    waiting = deque[Future[list[Row]]]()
    with ThreadPoolExecutor(workers) as pool:
        while waiting or time.monotonic() < end:
            while len(waiting) < workers and time.monotonic() < end:
                waiting.append(pool.submit(_apart, of, range(seed, seed + CHUNK)))
                seed += CHUNK
            yield waiting.popleft().result()


def _apart(of: str, seeds: range) -> list[Row]:
    """What a process of its own says of some seeds. One with which the process ends is a raw error."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(judged, of, seeds).result()
        except BrokenProcessPool:
            if len(seeds) == 1:
                made, way = subject(of, seeds[0])
                row = {"seed": seeds[0], "way": str(way), "kind": "raw", "why": "the process ended"}
                return [{**row, **_described(made, way)}]
    return [row for seed in seeds for row in _apart(of, range(seed, seed + 1))]


def merged(before: Section, made: Section, rows: list[Row]) -> Section:
    """The section with a run that has grown by some rows; ``made`` says where and by what."""
    runs = before.get("runs", [])
    if not runs or runs[-1]["seeds"][1] != rows[0]["seed"] or {**runs[-1], **made} != runs[-1]:
        runs = [*runs, {"seeds": [rows[0]["seed"]] * 2, "counts": {}, **made}]
    last = runs[-1]
    counts = Counter(last["counts"]) + Counter(row["kind"] for row in rows)
    grown = {**last, "seeds": [last["seeds"][0], rows[-1]["seed"] + 1], "counts": dict(counts)}
    reasons: dict[str, Counter[str]] = {"refused": Counter(), "left": Counter()}
    for kind, counter in reasons.items():
        counter.update(before.get("reasons", {}).get(kind, {}))
        counter.update(row["why"] for row in rows if row["kind"] == kind)
    return {
        "runs": [*runs[:-1], grown],
        "reasons": {kind: dict(counter.most_common()) for kind, counter in reasons.items()},
        "defects": [*before.get("defects", []), *(row for row in rows if row["kind"] in DEFECTS)],
    }


def judged_again(of: str, before: Section, commit: str) -> Section:
    """What becomes now of the texts of all defects; one that is mended says since which commit that is known."""
    defects = []
    for row in before.get("defects", []):
        mended = {} if _again(of, row).kind in DEFECTS else {"mended": row.get("mended", commit)}
        defects.append({**{key: value for key, value in row.items() if key != "mended"}, **mended})
    return {**before, "defects": defects}


def tell(rows: list[Row], found: Section) -> None:
    """Print what is not equal, and how far it is."""
    for row in rows:
        if row["kind"] not in ("equal", "invalid"):
            print(f"seed {row['seed']}, {row['way']}: {row['kind']}: {row['why']}")
    last = found["runs"][-1]
    print(f"{last['seeds'][1] - last['seeds'][0]} programs: {last['counts']}", flush=True)


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


def show_one(of: str, seed: int, console: Console) -> None:
    """The text of a program, what becomes of it, and what is to blame."""
    (row,) = judged(of, range(seed, seed + 1))
    console.print(row.pop("source", subject(of, seed)[0].source()), highlight=False, markup=False)
    console.print(row, highlight=False, markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=JUDGES, default="programs")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--defects", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    given, console = parser.parse_args(), Console()
    if given.seed is not None:
        show_one(given.of, given.seed, console)
        return
    found = read(given.out, given.of)
    if given.defects:
        found = judged_again(given.of, found, environment("")["commit"])
        write(given.out, given.of, found)
    elif not given.show:
        first = max((each["seeds"][1] for each in found.get("runs", [])), default=0)
        options = f"--of {given.of} --seconds {given.seconds:g} --workers {given.workers}"
        command = f"python benchmarks/campaign/campaign.py {options}"
        made = environment(command)
        for rows in run(given.of, first, given.seconds, given.workers):
            found = merged(read(given.out, given.of), made, rows)
            write(given.out, given.of, found)
            tell(rows, found)
    show(found, console)


if __name__ == "__main__":
    main()
