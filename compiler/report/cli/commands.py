"""The command line: ``plan`` from numbers alone, ``calibrate`` this machine, list the ``passes``, ask the ``doctor``.

Exit codes: 0, done; 1, no plan fits the budget, or the doctor found something wrong; 2, wrong input, with one
sentence on stderr.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from rich.console import Console

import reroll
from reroll.errors import OptionError, RerollError
from reroll.planning.offers import Priced, least, plan_rows, recommended
from reroll.program.registry import PASSES, entries
from reroll.report.cli.tables import machine_table, passes_table, plan_table, plan_text, refusal
from reroll.report.report import WIDTH
from reroll.schedules.machine import REMOTE_TIERS, Costs, Machine, MachineTier, SegmentSeconds
from reroll.words.units import nbytes_text, parse_bandwidth, parse_seconds, parse_size

_PLAN = """\
Prints what every schedule costs: its peak in local and remote memory, its time, the steps that run again and its
transfers, with the best chunk C and slots K under the budget (without one: of least local peak), and which to use.

Sizes are bytes or texts like 64KiB or 1.5GB, bandwidths texts like 2GB/s, times seconds or texts like 0.3ms.
Local bytes are those of kept carries and tapes; the running carry and its gradient come on top.
"""
_PLAN_EXAMPLES = """\
examples:
  python -m reroll plan --steps 100000 --carry 64KiB --tape 512KiB --forward 0.3ms --backward 0.7ms --budget 16MiB
      which schedule trains 100,000 steps in 16 MiB, without any other memory
  python -m reroll plan ... --remote 2GB/s --latency 50us --overlap
      with a second tier, written and read beside the computation
  python -m reroll plan ... --remote disk
      with this machine's disk, as measured by `python -m reroll calibrate`
  python -m reroll plan ... --json | jq .recommended.options
      the options to give to reroll.compile

exit codes: 0, a plan was found; 1, none fits the budget; 2, wrong input
"""
_EXAMPLES = """\
examples:
  python -m reroll plan --steps 100000 --carry 64KiB --tape 512KiB --forward 0.3ms --backward 0.7ms --budget 16MiB
  python -m reroll calibrate --force
  python -m reroll passes --json
  python -m reroll doctor

`python -m reroll COMMAND --help` says more.
exit codes: 0, done; 1, no plan fits the budget, or the doctor found something wrong; 2, wrong input
"""


class _Parser(argparse.ArgumentParser):
    """Errors are sentences of ours."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code. ``arguments`` default to those of the process."""
    try:
        parsed = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = parsed.run
        return run(parsed)
    except RerollError as error:
        sys.stderr.write(f"reroll: {error}\n")
        return 2


def _parser() -> _Parser:
    written = argparse.RawDescriptionHelpFormatter
    description = "Trains recurrent and spiking networks inside a memory budget: what can be asked without a model."
    parser = _Parser(prog="python -m reroll", description=description, epilog=_EXAMPLES, formatter_class=written)
    parser.add_argument("--version", action="version", version=f"reroll {reroll.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    plan = commands.add_parser(
        "plan",
        help="what every schedule costs for a recurrence given in numbers, and which to use",
        description=_PLAN,
        epilog=_PLAN_EXAMPLES,
        formatter_class=written,
        allow_abbrev=False,
    )
    _plan_arguments(plan)
    text = "measure what the tiers of this machine move in a second"
    about = "Measures bandwidth and latency of host memory and disk, as training moves blocks. The result is kept."
    calibrate = commands.add_parser("calibrate", help=text, description=about, allow_abbrev=False)
    calibrate.add_argument("--force", action="store_true", help="measure again, though it is known")
    calibrate.add_argument("--folder", help="folder of the disk tier (default: the system's temporary folder)")
    calibrate.set_defaults(run=_calibrate)
    text = "list the passes: what they work on, what they do, and the default order"
    passes = commands.add_parser("passes", help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    passes.set_defaults(run=_passes)
    text = "look at versions, compiler, cores, memory, disk and caches, and train a tiny network"
    about = f"{text.capitalize()}, by eager and by inductor lowering. Exit code 1 where something is wrong."
    doctor = commands.add_parser("doctor", help=text, description=about, allow_abbrev=False)
    doctor.set_defaults(run=_doctor)
    for command in (plan, calibrate, passes, doctor):
        command.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes and times in seconds")
    return parser


def _plan_arguments(plan: argparse.ArgumentParser) -> None:
    network = plan.add_argument_group("the recurrence")
    network.add_argument("--steps", metavar="T", help="steps of the sequence")
    network.add_argument("--carry", metavar="SIZE", required=True, help="bytes of a carry, the state handed on")
    network.add_argument("--tape", metavar="SIZE", required=True, help="bytes that the backward of one step needs")
    network.add_argument("--forward", metavar="TIME", required=True, help="time of one step forward")
    network.add_argument("--backward", metavar="TIME", required=True, help="time of one step backward")
    network.add_argument("--segment", metavar="STEPS", default="1", help="steps compiled together (default: 1)")
    memory = plan.add_argument_group("memory")
    memory.add_argument("--budget", metavar="SIZE", help="local bytes that may be used")
    memory.add_argument(
        "--remote", metavar="RATE", help="bandwidth of the remote tier, or disk or host: as measured here"
    )
    memory.add_argument("--write", metavar="RATE", help="bandwidth of writes, where it is another")
    memory.add_argument("--read", metavar="RATE", help="bandwidth of reads, where it is another")
    memory.add_argument("--latency", metavar="TIME", help="time that each transfer takes besides")
    memory.add_argument(
        "--overlap", action="store_true", help="transfers run beside the computation, else they block it"
    )
    numbers = plan.add_argument_group("numbers that are fixed")
    numbers.add_argument("--chunk", metavar="STEPS", help="steps between the carries of chunks")
    numbers.add_argument("--slots", metavar="K", help="local carries of a chunk")
    plan.set_defaults(run=_plan)


def _plan(given: argparse.Namespace) -> int:
    problem = _problem(given)
    _say_more_than_here(problem)
    rows = plan_rows(problem)
    best = recommended(problem, rows)
    if given.json:
        _print_json(
            {
                "rows": [asdict(row) for row in rows],
                "recommended": best and {**asdict(best), "options": best.options(problem.segment)},
                "least_budget": least(problem, plan_rows(replace(problem, memory=1))).local_peak,
            }
        )
    else:
        console = _console()
        console.print(plan_table(problem, rows, best))
        console.print(plan_text(problem, rows, best))
    if best is None:
        sys.stderr.write(f"reroll: {refusal(problem, rows)}\n")
    return 1 if best is None else 0


def _problem(given: argparse.Namespace) -> Priced:
    segment, tier = _count(given.segment, "--segment"), _tier(given)
    forward = segment * parse_seconds(given.forward, "--forward")
    seconds = SegmentSeconds(forward, forward, segment * parse_seconds(given.backward, "--backward"))
    return Priced(
        steps=_steps(given.steps),
        carry=parse_size(given.carry, "--carry"),
        tape=segment * parse_size(given.tape, "--tape"),
        costs=Costs({segment: seconds}, Machine("given", {tier.name: tier} if tier else {}), given.overlap),
        segment=segment,
        memory=None if given.budget is None else parse_size(given.budget, "--budget"),
        tier=tier.name if tier else "local",
        chunk=None if given.chunk is None else _count(given.chunk, "--chunk"),
        slots=None if given.slots is None else _count(given.slots, "--slots"),
    )


def _tier(given: argparse.Namespace) -> MachineTier | None:
    """The remote tier: as measured, or made of the numbers given; None without any."""
    numbers: dict[str, Any] = {}
    name = "disk"
    if given.remote in REMOTE_TIERS:
        name = given.remote
        measured = reroll.calibrate().tier(name)
        numbers = {each: getattr(measured, each) for each in ("write", "read", "latency", "capacity")}
    elif given.remote is not None:
        numbers = dict.fromkeys(("write", "read"), parse_bandwidth(given.remote, "--remote"))
    for way in ("write", "read"):
        if getattr(given, way) is not None:
            numbers[way] = parse_bandwidth(getattr(given, way), f"--{way}")
    if given.latency is not None:
        numbers["latency"] = parse_seconds(given.latency, "--latency")
    if given.latency is not None and not {"write", "read"} & set(numbers):
        raise OptionError(f"--latency={given.latency!r} is that of a remote tier. Give its bandwidth, --remote, too.")
    return MachineTier.of(name, numbers) if numbers else None


def _steps(text: str | None) -> int:
    if text is None or text.lower() in ("unknown", "none", "?"):
        found = "is missing" if text is None else f"is {text!r}"
        raise OptionError(
            f"--steps {found}, but every schedule of a plan needs the number of steps: give --steps 1000. While it is "
            "not known, reroll.schedules.Online says step by step which carries to keep."
        )
    return _count(text, "--steps")


def _say_more_than_here(problem: Priced) -> None:
    """Numbers may be those of another machine, so a budget that this one has not is only told."""
    total = reroll.total_memory() if problem.memory is not None else None
    if problem.memory is not None and total is not None and problem.memory > total:
        sys.stderr.write(
            f"reroll: the budget {nbytes_text(problem.memory)} is more than the {nbytes_text(total)} of memory that "
            "this machine has. The plan is for one that has as much.\n"
        )


def _count(text: str, name: str) -> int:
    """A whole number, also written as 1e5."""
    written = re.fullmatch(r"(\d{1,15})(?:[eE]\+?(\d{1,2}))?", text, re.ASCII)
    found = int(written[1]) * 10 ** int(written[2] or 0) if written else 0
    if not 1 <= found < 10**15:
        raise OptionError(f"{name}={text[:40]!r} must be a whole number of at least 1, and of 15 digits at most.")
    return found


def _calibrate(given: argparse.Namespace) -> int:
    machine = reroll.calibrate(force=given.force, folder=given.folder)
    if given.json:
        sys.stdout.write(f"{machine.to_json()}\n")
    else:
        _console().print(machine_table(machine))
    return 0


def _passes(given: argparse.Namespace) -> int:
    order = reroll.DEFAULT_PASSES
    found = [
        {
            "name": entry.name,
            "on": entry.on,
            "default": order.index(entry.name) + 1 if entry.name in order else None,
            "what": (inspect.getdoc(entry.target) or "").partition("\n")[0],
            "origin": PASSES.origin(entry.name),
        }
        for entry in entries()
    ]
    found.sort(key=lambda each: (each["default"] is None, each["default"] or 0, each["name"]))
    if given.json:
        _print_json(found)
    else:
        _console().print(passes_table(found))
    return 0


def _doctor(given: argparse.Namespace) -> int:
    found = reroll.doctor()
    if given.json:
        _print_json([asdict(each) for each in found])
    else:
        sys.stdout.writelines(f"{each}\n" for each in found)
    return int(any(each.todo for each in found))


def _print_json(found: object) -> None:
    sys.stdout.write(f"{json.dumps(found, indent=2)}\n")


def _console() -> Console:
    """As wide as the terminal; as a report, where there is none."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
