"""Two versions of reroll in turns: ``python benchmarks/versions.py --before FOLDER``, a checkout of the earlier one.

Each version runs in a process of its own, pinned to one core with one thread; both do a training step of the same
network under the same options, one after the other, so that a loaded machine is as slow for both. CPU seconds, and the
allocator's peak above inputs, parameters and their gradients; gradients of the two are compared. A row is saved in
``results/versions.json`` as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import aside, cost_of, gradients, machine, pinned, relative_error, training_step
from rich.console import Console
from rich.table import Table
from speed_networks import NETWORKS

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "versions.json"
OPTIONS: dict[str, dict[str, Any]] = {
    "reroll": {},
    "reroll, standard": {"schedule": "standard"},
    "reroll, double (disk)": {"schedule": "double", "remote": "disk"},
}


def serve(name: str, options: str, core: int, folder: Path) -> None:
    """In a process of its own: compile, say what a step holds, then run a step for each line that comes in."""
    import reroll

    begin = time.process_time()
    torch.manual_seed(0)
    make, inputs, steps = NETWORKS[name]
    network, x = make(), inputs(steps)
    compiled: dict[str, Any] = (
        {"start": "compiled"} if "start" in reroll.Options.__dataclass_fields__ else {}
    )  # a later option
    training = training_step(reroll.compile(network, **OPTIONS[options], **compiled), network, x)
    with pinned(core):
        training()
        first = time.process_time() - begin
        network.zero_grad(set_to_none=True)
        peak = cost_of(training, [network]).local_peak
        torch.save(gradients(training, network), folder)
        print(json.dumps({"version": reroll.__version__, "first_step_s": first, "local_peak_bytes": peak}), flush=True)
        for _ in sys.stdin:
            begin = time.process_time()
            with aside():
                training()
            print(time.process_time() - begin, flush=True)


class Version:
    """A version of reroll that waits in its own process."""

    def __init__(self, root: Path, name: str, options: str, core: int, folder: Path) -> None:
        package, self.gradients = folder / "package" / "reroll", folder / "gradients"
        package.mkdir(parents=True)
        for top in ("compiler", "passes", "backends"):
            for path in (root / top).iterdir() if top == "compiler" else [root / top]:
                (package / path.name).symlink_to(path)
        command = [sys.executable, __file__, "--serve", name, options, str(self.gradients), "--core", str(core)]
        paths = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        environment |= {"REROLL_CACHE_DIR": str(folder / "reroll")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.told: dict[str, Any] = json.loads(self._line())
        self.seconds: list[float] = []

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def step(self) -> None:
        """One training step."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.seconds.append(float(self._line()))

    def result(self) -> dict[str, Any]:
        """What was measured; the process ends."""
        self.process.communicate()
        return {**self.told, "median_s": statistics.median(self.seconds), "least_s": min(self.seconds)}


def row(before: Path, name: str, options: str, rounds: int, core: int) -> dict[str, Any]:
    """Both versions of one network under one set of options."""
    with tempfile.TemporaryDirectory() as folder:
        roots = {"before": before, "after": HERE.parent}
        versions = {each: Version(root, name, options, core, Path(folder) / each) for each, root in roots.items()}
        for number in range(rounds):
            for version in list(versions.values())[:: 1 if number % 2 else -1]:
                version.step()
        one, other = (torch.load(version.gradients) for version in versions.values())
        found: dict[str, Any] = {each: version.result() for each, version in versions.items()}
        same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    ratios = {
        f"{kind}_ratio": found["after"][f"{kind}_s"] / found["before"][f"{kind}_s"] for kind in ("median", "least")
    }
    return {**found, **ratios, "same_bits": same, "relative_error": relative_error(other, one)}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    table = Table("network", "options", "before, s", "after, s", "ratio", "peak before", "after", "same bits")
    for key, each in result["rows"].items():
        name, _, options = key.partition(": ")
        seconds = (f"{each[version]['median_s']:.3f}" for version in ("before", "after"))
        peaks = (f"{each[version]['local_peak_bytes']:,}" for version in ("before", "after"))
        table.add_row(name, options, *seconds, f"{each['median_ratio']:.3f}", *peaks, str(each["same_bits"]))
    Console(width=140).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--only", nargs="*", default=["recurrent LIF (D2r)", "LSTM cell"], help="names of networks")
    parser.add_argument("--options", nargs="*", default=list(OPTIONS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print what was measured before")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--serve", nargs=3, metavar=("NETWORK", "OPTIONS", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve[0], given.serve[1], given.core, Path(given.serve[2]))
        return
    if not given.show:
        if given.before is None:
            parser.error("--before is missing: name a checkout of the earlier version")
        result = machine(f"python benchmarks/versions.py --rounds {given.rounds}") | {"rows": {}}
        for key in [(name, options) for name in given.only for options in given.options]:
            result["rows"][": ".join(key)] = row(given.before, *key, given.rounds, given.core)
            given.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    show(json.loads(given.out.read_text("utf-8")))


if __name__ == "__main__":
    main()
