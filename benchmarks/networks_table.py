"""``reroll.compile`` on the networks that others wrote (``tests/networks``) against plain eager: a row per network.

    python benchmarks/networks_table.py                              all networks, eager lowering
    python benchmarks/networks_table.py --lowering inductor --only torch-lstm,snntorch-leaky
    python benchmarks/networks_table.py --show                       print what is in the result file

A row is measured in a process of its own and saved at once in ``results/networks.json``; one that is there already is
left alone unless ``--again`` is given, so a run can be stopped and goes on where it was. Each network is made larger:
its batch and its widths times a factor (``wider.py``; images less), so that hidden layers have about 100 neurons.

- error: the largest difference of any gradient of a parameter from eager's, relative to that gradient's largest entry
- peak: what the allocator holds in one training step above inputs, parameters and their gradients
- time: CPU seconds of one training step, one thread, medians, eager = 1
- first call: wall seconds of the first forward in a fresh process (T=64) or after a reset of Dynamo (T=4,096), with an
  empty inductor cache; it records the model, compiles, and runs it
- compiled: records that were made of the model (``graphs``; graphs that Dynamo traced, in rows of before) and segments
  that were compiled, after the first call, and after ten lengths
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import networks_row
import torch
from measuring import machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
FAST = {"steps": 24, "batch": 1, "width": 1, "rounds": 1, "first": [12, 40]}
Result = dict[str, Any]


def measured(name: str, options: Result, seconds: float) -> Result:
    """A row, measured in a fork of this process: libraries are loaded already, and nothing of torch's is compiled."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, name, options))
    process.start()
    theirs.close()
    try:
        row: Result = ours.recv() if ours.poll(seconds) else {"failed": f"gave nothing within {seconds:.0f} s"}
    except EOFError:
        process.join()
        row = {"failed": f"ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    return row


def _send(pipe: Connection, name: str, options: Result) -> None:
    pipe.send(networks_row.main(name, options))


def parse(given: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowering", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--only", default=None, type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--steps", type=int, default=512, help="T of the step whose memory and time are measured")
    parser.add_argument("--first", type=int, nargs=2, default=[64, 4096], help="T of first calls")
    parser.add_argument("--batch", type=int, default=8, help="factor of the batch, which is 2 in the tests")
    parser.add_argument("--width", type=int, default=24, help="factor of all widths")
    parser.add_argument("--rounds", type=int, default=3, help="training steps that are timed")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a row")
    parser.add_argument("--fast", action="store_true", help="sizes that show nothing but that it runs")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--show", action="store_true", help="only print the result file")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "networks.json")
    options = parser.parse_args(given, argparse.Namespace(given=given))
    if options.fast:
        vars(options).update(FAST)
    return options


def main(given: list[str]) -> Result:
    """Measure the rows that are not there yet, save each, and print all."""
    options = parse(given)
    result: Result = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = result.setdefault(options.lowering, {})
    names = options.only or list(networks_row.cases())
    if unknown := set(names) - set(networks_row.cases()):
        raise SystemExit(f"no such network: {', '.join(sorted(unknown))}")
    wanted = [name for name in names if options.again or name not in rows]
    short, long = options.first
    sizes = {key: getattr(options, key) for key in ("lowering", "steps", "batch", "width", "rounds")}
    firsts = {"standard": {"length": short, "calls": 3}, "double": {"length": long, "calls": 1}}
    torch.set_num_threads(1)
    command = " ".join(["python", "benchmarks/networks_table.py", *options.given])
    for name in [] if options.show else wanted:
        before = os.getloadavg()
        row = measured(name, {**sizes, "first": firsts}, options.limit)
        rows[name] = {**row, "environment": machine(command), "load_average": [before, os.getloadavg()]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return result


def show(result: Result) -> None:
    """Print the tables."""
    console = Console(width=170)
    for lowering, rows in result.items():
        columns = (
            "T",
            "eager MB",
            "standard",
            "double",
            "x eager",
            "double",
            "error",
            "first s",
            "long",
            "graphs",
            "segments",
        )
        table = Table(title=f"reroll.compile, {lowering} lowering", title_justify="left")
        for column in ("network", *columns):
            table.add_column(column, justify="right" if column != "network" else "left", no_wrap=True)
        for name, row in rows.items():
            table.add_row(name, *cells(row))
        console.print(table)
        for name, row in rows.items():
            if sentence := refusal(row):
                console.print(f"{name}: {sentence}", markup=False, highlight=False)


def refusal(row: Result) -> str | None:
    """Why there are no figures, if there are none."""
    found: list[str] = [
        each["refused"] for each in (row.get("standard", {}), row.get("double", {})) if "refused" in each
    ]
    return row.get("failed") or (found[0] if found else None)


def cells(row: Result) -> list[str]:
    """The columns of a row after its name."""
    if refusal(row):
        return ["no figures, see below"]
    standard, double = row["standard"], row["double"]
    both = {"standard": standard, "double": double}
    first, last = standard["compiled_after_first_calls"][0], standard["compiled_after_ten_lengths"]
    return [
        str(row["steps"]),
        f"{standard['local_peak_bytes']['eager'] / 1e6:.1f}",
        *(f"{each['local_peak_bytes'][name] / 1e6:.2f}" for name, each in both.items()),
        *(f"{each['time'][name]['median_ratio']:.2f}" for name, each in both.items()),
        f"{max(each['relative_error'] for each in both.values()):.0e}",
        *(f"{each['first_calls_s'][0]:.1f}" for each in both.values()),
        *(f"{first[what]} to {last[what]}" for what in ("graphs", "segments")),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
