"""Memory, time and compile cost of reroll on network D2r, against plain BPTT in the same run: ``make bench``.

Parts: ``memory`` and ``time`` of every schedule at T=1,024, ``long`` (double with disk at T=4,096 against plain BPTT at
T=1,000) and ``compile`` (the backend after Dynamo, at about 64 and 1,024 steps, each in a fresh process and cache).
"Local peak" is what the allocator holds above inputs, parameters and their gradients; MiB are 2^20 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from contenders import CHECKPOINT, EAGER, contenders, named_options
from measuring import (
    Step,
    empty_caches,
    gradients,
    interleaved,
    machine,
    pinned,
    relative_error,
    summary,
    training_step,
)
from network_d import Checkpointed, NetworkD, inputs
from tables import draw, show
from torch import Tensor

from reroll import measure
from reroll.backends.tiers.spill_file import filesystem

HERE = Path(__file__).resolve().parent
PARTS = ("memory", "time", "long", "compile")
Result = dict[str, Any]


def all_contenders(options: argparse.Namespace) -> tuple[NetworkD, dict[str, Step], Result]:
    """One training step per contender, over one network and one input, compiled and run once; the plans of reroll's."""
    torch.manual_seed(0)
    network, x = NetworkD(options.neurons), inputs(options.steps, options.batch)
    ours = contenders(network, named_options(options.lowerings, options.spill_folder))
    models: dict[str, Callable[[Tensor], Tensor]] = {EAGER: network, CHECKPOINT: Checkpointed(network), **ours}
    steps = {name: training_step(model, network, x) for name, model in models.items()}
    for step in steps.values():
        step()
    return network, steps, {name: each.described(x) for name, each in ours.items()}


def memory(network: NetworkD, steps: Mapping[str, Step]) -> Result:
    """Local peak and gradient error of every contender."""
    expected = gradients(steps[EAGER], network)
    found = {}
    for name, step in steps.items():
        error = relative_error(gradients(step, network), expected)
        network.zero_grad(set_to_none=True)
        found[name] = {"local_peak_bytes": measure(step, [network]).local_peak, "relative_error": error}
    return found


def step_time(steps: Mapping[str, Step], options: argparse.Namespace) -> Result:
    """CPU seconds per training step of every contender, in turn."""
    with pinned(options.core):
        return summary(interleaved(steps, options.rounds), EAGER)


def long_sequence(options: argparse.Namespace) -> Result:
    """The local peak of double with disk on a long sequence, and of plain BPTT on a shorter one."""
    torch.manual_seed(0)
    network, x = NetworkD(options.neurons), inputs(options.long_steps, options.batch)
    plain = training_step(network, network, x[: options.short_steps])
    plain()
    network.zero_grad(set_to_none=True)
    plain_peak = measure(plain, [network]).local_peak
    expected = gradients(training_step(network, network, x), network)
    folder = options.spill_folder or tempfile.gettempdir()
    chosen = {"schedule": "double", "remote": "disk", "spill_folder": folder, "lowering": options.lowerings[-1]}
    double = contenders(network, {"double": chosen})["double"]
    step = training_step(double, network, x)
    error = relative_error(gradients(step, network), expected)
    network.zero_grad(set_to_none=True)
    peak, choice = measure(step, [network]).local_peak, double.plan(x).choice
    return {
        "steps": options.long_steps,
        "plain_steps": options.short_steps,
        "plain_local_peak_bytes": plain_peak,
        "local_peak_bytes": peak,
        "ratio": peak / plain_peak,
        "relative_error": error,
        "chunks": -(-choice.steps // (choice.problem.chunk or 1)),
        "slots": choice.problem.slots,
        **double.described(x),
        "spill_folder": folder,
        "filesystem": filesystem(folder),
    }


def compile_cost(options: argparse.Namespace) -> Result:
    """Wall seconds of the backend after Dynamo for a short and a long sequence: the least of a few fresh processes."""
    runs: dict[str, list[Result]] = {"short": [], "long": []}
    for _ in range(options.compile_rounds):
        for name, steps in zip(runs, options.compile_steps, strict=True):
            runs[name].append(fresh_compilation(steps, options))
    best = {name: min(each, key=lambda run: float(run["backend_s"])) for name, each in runs.items()}
    ratio = best["long"]["backend_s"] / best["short"]["backend_s"]
    seconds = {name: [run["backend_s"] for run in each] for name, each in runs.items()}
    return {**best, "ratio": ratio, "backend_s_of_all_runs": seconds}


def fresh_compilation(steps: int, options: argparse.Namespace) -> Result:
    """``compile_cost.py`` in a process and an inductor cache of its own."""
    with empty_caches() as caches:
        command = [sys.executable, HERE / "compile_cost.py", str(steps), str(options.batch), options.lowerings[-1]]
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"compile_cost.py at T={steps} failed:\n{done.stderr}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def goals(result: Result) -> list[tuple[str, float, float, bool]]:
    """(what, found, at most, met) of every figure that must be shown and was measured at full size."""
    found: list[tuple[str, float, float]] = []
    mib = {name: each["local_peak_bytes"] / 2**20 for name, each in result.get("memory", {}).items()}
    rows = {**result.get("memory", {}), **({"long": result["long"]} if "long" in result else {})}
    for name, peak in mib.items():
        if name.startswith(("standard", "double (disk)")):
            found.append((f"local peak of {name}, MiB", peak, 6.9 if name.startswith("standard") else 3.0))
    for name, each in result.get("time", {}).items():
        if name == "standard, inductor":
            found.append((f"time of {name} / plain BPTT", each["least_ratio"], 1.0))
    if "long" in result:
        found.append(("local peak of double (disk) at long T / plain BPTT", result["long"]["ratio"], 1 / 20))
    if "compile" in result:
        found.append(("backend's wall seconds, long T / short T", result["compile"]["ratio"], 1.5))
    plans = {**result.get("plans", {}), **({"long": result["long"]} if "long" in result else {})}
    if rows:
        off = [
            abs(plans[name]["predicted_peak_bytes"] / rows[name]["local_peak_bytes"] - 1)
            for name in plans
            if name in rows
        ]
        found.append(("largest distance of explain's predicted peak from the measured", max(off), 0.15))
        found.append(
            ("largest relative error of a gradient", max(each["relative_error"] for each in rows.values()), 1e-4)
        )
    return [(what, value, most, value <= most) for what, value, most in found]


def environment(options: argparse.Namespace) -> Result:
    """Where and how this was measured."""
    return {
        **machine(" ".join(["python", "benchmarks/figures.py", *options.given])),
        "load_average_before": os.getloadavg(),
        "network": {key: getattr(options, key) for key in ("steps", "batch", "neurons")},
        "pinned_to_core": options.core,
    }


def parse(given: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--neurons", type=int, default=256)
    parser.add_argument("--lowerings", default="eager,inductor", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=7, help="training steps of each contender that are timed")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to time on")
    parser.add_argument("--long-steps", type=int, default=4096)
    parser.add_argument("--short-steps", type=int, default=1000)
    parser.add_argument("--compile-steps", type=int, nargs=2, default=(65, 1025), help="one more than the rolled steps")
    parser.add_argument("--compile-rounds", type=int, default=2)
    parser.add_argument(
        "--spill-folder", default=None, help="folder of the disk tier; by default the system's temporary"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "figures.json")
    parser.add_argument("--plot", action="store_true", help="draw memory against time beside the result (matplotlib)")
    options = parser.parse_args(given, argparse.Namespace(given=given))
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def main(given: list[str]) -> Result:
    """Measure, print, and write the result."""
    options = parse(given)
    result: Result = {"environment": environment(options)}
    with pinned(None):
        if {"memory", "time"} & set(options.only):
            network, steps, result["plans"] = all_contenders(options)
            if "memory" in options.only:
                result["memory"] = memory(network, steps)
            if "time" in options.only:
                result["time"] = step_time(steps, options)
        if "long" in options.only:
            result["long"] = long_sequence(options)
        if "compile" in options.only:
            result["compile"] = compile_cost(options)
    result["goals"] = goals(result)
    result["environment"]["load_average_after"] = os.getloadavg()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    if options.plot:
        draw(result, options.out.with_suffix(".png"))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
