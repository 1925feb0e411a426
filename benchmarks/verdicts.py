"""What ``reroll.compile`` makes of every network and of many programs: golden verdicts, and what became worse.

    python benchmarks/verdicts.py --libraries build/site-packages    # all rows; goes on where it was stopped
    python benchmarks/verdicts.py --out build/verdicts.json --against benchmarks/results/verdicts.json
    python benchmarks/verdicts.py --only zoo --again                 # some parts, also rows that are there
    python benchmarks/verdicts.py --show

Parts: the zoo of the tests at several lengths, the networks of ``doors.py`` (its packages), and seeds of the campaign
that it has not come to. A row is a call with its gradients in float64, in eager segments and without proofs, compared
by ``reroll.check`` with plain PyTorch.
``--against`` makes the rows that the other file has, says which of them are worse there, and ends with an error if any
is.

- verdict: *rolled*, *plain* (torch ran the call as it is), or one of the campaign's: *refused*, *invalid*, a defect
- loops, carries: of each loop that was played, the steps, and the bytes of what they carry
- raised, why: the class of an error, and its first line
- error: the largest difference, relative to the largest entry of its tensor, up to the next power of ten
- short: what a loop computes has less than float64's digits
- text: a digest of the program; rows of another text are not compared
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from reroll.backends.construct.stages.seen import rounding_of

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "verdicts.json"
LENGTHS = (5, 6, 9, 13, 21, 40)
SEEDS = {"programs": 400, "wholes": 60, "losses": 60, "kinds": 20, "sizes": 10}
PARTS = ("zoo", "doors", *SEEDS)
FIRST = 20_000  # seed
CHUNK = 40  # rows of one process
LEAST, ROUNDING = 1e-16, 1e-10  # errors: the smallest that is told apart, and one above which float64 is not rounding
OPTIONS = (("lowering", "eager"), ("proof", "never"), ("start", "eager"))
BEST_FIRST = ("rolled", "plain", "left", "refused", "invalid")  # others are defects; left: plain, with a warning
Row = dict[str, Any]

sys.path += [str(HERE), str(HERE / "campaign"), str(HERE.parent / "tests" / "support" / "zoo")]
judge, measuring = import_module("judge"), import_module("measuring")
WAY = judge.Way("compile", OPTIONS)


def names(part: str) -> list[str]:
    """The rows of a part."""
    if part == "zoo":
        return [f"{name} {steps}" for name in import_module("networks_zoo").load() for steps in LENGTHS]
    if part == "doors":
        return [*import_module("doors").NETWORKS]
    return [str(FIRST + n) for n in range(SEEDS[part])]


def row(part: str, name: str) -> Row:
    """What becomes of a network or program, here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    with judge.played() as loops:
        verdict, text = _made(part, name)
    kind = ("rolled" if loops else "plain") if verdict.kind == "equal" else verdict.kind
    made = Row(verdict=kind)
    if loops:
        made["loops"] = [loop.steps for loop in loops]
        made["carries"] = [sum(each.nbytes for each in loop.examples[: len(loop.carries)]) for loop in loops]
    if kind in ("rolled", "plain", "wrong"):
        made["error"] = 0.0 if verdict.error == 0 else max(LEAST, float(f"1e{math.ceil(math.log10(verdict.error))}"))
    made |= {"raised": verdict.raised} if verdict.raised else {}
    made |= {"why": verdict.why} if verdict.why else {}
    made |= {"short": True} if rounding_of(loops).values > ROUNDING else {}
    return made | ({"text": hashlib.sha256(text.encode()).hexdigest()[:8]} if text else {})


def _made(part: str, name: str) -> tuple[Any, str]:
    if part == "zoo":
        return _of_zoo(name)
    return _of_doors(name) if part == "doors" else _of_campaign(part, name)


def _of_zoo(name: str) -> tuple[Any, str]:
    """A network at a length, its sequences leaves where torch allows it."""
    zoo = import_module("networks_zoo")
    network, steps = zoo.load()[name.split()[0]], int(name.split()[1])
    net = zoo.Net(network)
    given = tree_map_only(
        torch.Tensor, lambda v: v.requires_grad_(network.leaf) if v.is_floating_point() else v, network.inputs(steps)
    )
    return judge.compared(net, partial(WAY.compiled, net), given, {}, None), ""


def _of_doors(name: str) -> tuple[Any, str]:
    """A network of ``doors.py`` at its own length; in float32 where its library computes in nothing else."""
    torch.set_default_dtype(torch.float32)  # what libraries make of it themselves
    verdict = _in(torch.float64, name)
    return (_in(torch.float32, name) if verdict.kind == "invalid" else verdict), ""


def _in(dtype: torch.dtype, name: str) -> Any:
    network = import_module("doors").NETWORKS[name]()
    for part in network.parts:
        part.to(dtype)
    network.reset()
    given = [each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each for each in network.inputs]
    tolerance = None if dtype == torch.float64 else judge.SHORT
    return judge.compared(network.run, partial(WAY.compiled, network.run), given, {}, tolerance)


def _of_campaign(part: str, seed: str) -> tuple[Any, str]:
    """A program of a part of the campaign, all by one way."""
    if part == "kinds":
        made = replace(import_module("kinds").model(int(seed), "compile", draws=True), way=WAY.text())
        return judge.judge_calls(made, WAY), made.source()
    program = import_module("programs").generate(int(seed), losses=part == "losses", wholes=part == "wholes")
    return (judge.judge_sizes if part == "sizes" else judge.judge)(program, WAY), program.source()


def made_apart(part: str, wanted: list[str], libraries: str | None) -> Iterator[tuple[str, Row]]:
    """The rows, in processes of their own. Where one ends early, so does the row it was at."""
    while wanted:
        command = [sys.executable, __file__, "--rows", part, *wanted[:CHUNK]]
        command += ["--libraries", libraries] if libraries else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            done = 0
            for done, line in enumerate(process.stdout, 1):
                yield wanted[done - 1], json.loads(line)
        if done < min(CHUNK, len(wanted)):
            yield wanted[done], Row(verdict="raw", why=f"the process ended with {process.returncode}")
            done += 1
        wanted = wanted[done:]


def worse(before: Row, after: Row) -> str:
    """In what a row became worse; empty if in nothing."""
    if before.get("text") != after.get("text"):
        return ""
    old, new = before["verdict"], after["verdict"]
    if old != new:
        ranks = [BEST_FIRST.index(each) if each in BEST_FIRST else len(BEST_FIRST) for each in (old, new)]
        return f"{old} -> {new} {after.get('why', '')}" if ranks[0] < ranks[1] else ""
    if before.get("raised") != after.get("raised"):
        return f"refused by {after.get('raised')}, before by {before.get('raised')}"
    if sum(before.get("loops", ())) > sum(after.get("loops", ())):
        return f"loops of {after.get('loops')} steps, before {before['loops']}"
    if sum(before.get("carries", ())) < sum(after.get("carries", ())):
        return f"carries of {after['carries']} bytes, before {before['carries']}"
    errors = [max(each.get("error", 0.0), ROUNDING / 100) for each in (before, after)]
    return f"error {after['error']:.0e}, before {before['error']:.0e}" if errors[0] < errors[1] else ""


def read(path: Path) -> dict[str, Any]:
    """A file of verdicts: how it was made, and rows by part and name."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"made": {}, "parts": {}}
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """One line a row, so that people can read how two files differ."""
    parts = []
    for part, rows in found["parts"].items():
        lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in rows.items()]
        parts.append(f"{json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n}")
    begun = path.with_suffix(".begun")  # a file is whole, whenever this is stopped
    begun.write_text(f'{{"made": {json.dumps(found["made"])},\n"parts": {{\n' + ",\n".join(parts) + "\n}}\n")
    begun.replace(path)


def show(found: dict[str, Any]) -> None:
    """Counts by part."""
    for part, rows in found["parts"].items():
        kinds = Counter(" ".join(filter(None, (each["verdict"], each.get("raised")))) for each in rows.values())
        print(f"{part}: {len(rows)} rows: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")


def main() -> int:
    """Make rows, save each, and compare. Gives how many rows became worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--libraries", help="a folder with the libraries of doors.py")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--against", type=Path, help="a file of verdicts, to which the rows are compared")
    parser.add_argument("--show", action="store_true", help="print what is there")
    parser.add_argument("--rows", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path += [options.libraries] if options.libraries else []
    if options.rows:
        return _print_rows(*options.rows)
    before = read(options.against)["parts"] if options.against else {}
    found, count = read(options.out), 0
    for part in () if options.show else options.only:
        rows = found["parts"].setdefault(part, {})
        wanted = [*before.get(part, {})] if options.against else names(part)
        missing = [name for name in wanted if options.again or name not in rows]
        for name, made in made_apart(part, missing, options.libraries):
            rows[name] = made
            found["made"] = measuring.machine("python benchmarks/verdicts.py --libraries FOLDER")
            write(options.out, found)
        for name in wanted:
            text = worse(before[part][name], rows[name]) if options.against else ""
            count += bool(text)
            print(*[f"{part} {name}: {text}"] if text else [], end="\n" if text else "", flush=True)
    show(found)
    return count


def _print_rows(part: str, *rows: str) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in rows:
        print(json.dumps(row(part, name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(min(main(), 1))
