"""What ``reroll.compile`` costs as T grows: ``python benchmarks/lengths.py``.

- compile: wall seconds of the first three training steps at T=64 and at T=16,384, each in a fresh process and with an
  empty inductor cache, on network D (D2r, ``network_d.py``) and two layers of snnTorch's ``Leaky``. The cost is what
  the first two take longer than the third: a model that keeps its state in attributes, as snnTorch's does, is compiled
  again at its second call, when they hold tensors. The cost includes what is done at the full length: runs that are
  recorded (``record_s``), and the search for loops in the records (``search_s``). Results of before have the runs that
  checked a length (``check_s``) in place of both.
- long: one training step of network D2r over T=100,000 steps, ``double`` with disk, against plain BPTT at T=1,000 and
  the same batch. The allocator's peak is measured at T=1,000; at T=100,000, where the profiler's events would fill the
  memory, there are the predicted peak and by how much the process grows at most, Python's memory included.

Each part is saved in ``results/lengths.json`` as it is measured; ``--only compile,long`` names parts.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measuring import (
    cost_of,
    empty_caches,
    gradients,
    interleaved,
    machine,
    relative_error,
    resident_growth,
    training_step,
)
from network_d import NetworkD, inputs
from torch import Tensor, nn

import reroll
import reroll.backends.front.full.at_length as at_length
from reroll.backends.front.recorded import Recorded

HERE = Path(__file__).resolve().parent
PARTS = ("compile", "long")
ROUNDS = 5  # of plain BPTT's time
NETWORKS = ("network D2r", "snnTorch Leaky")
Result = dict[str, Any]


class Leaky(nn.Module):
    """Two layers of snnTorch's ``Leaky``, the loop of its tutorials; the mean of the membranes over time."""

    def __init__(self, neurons: int = 256) -> None:
        super().__init__()
        import snntorch  # needed by one of the networks

        self.fc1, self.fc2 = nn.Linear(64, neurons), nn.Linear(neurons, 10)
        self.lif1, self.lif2 = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The membranes of the second layer, (T, B, O)."""
        mem1, mem2, record = self.lif1.init_leaky(), self.lif2.init_leaky(), []
        for t in range(x_TBI.shape[0]):
            spk1, mem1 = self.lif1(self.fc1(x_TBI[t]), mem1)
            _, mem2 = self.lif2(self.fc2(spk1), mem2)
            record.append(mem2)
        return torch.stack(record)


def network(name: str, neurons: int) -> nn.Module:
    """A network with its seed."""
    torch.manual_seed(0)
    return NetworkD(neurons) if name == NETWORKS[0] else Leaky(neurons)


@contextmanager
def timed(module: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Collect the wall seconds of the calls of a function of a module or class."""
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, function)


def wall(call: Callable[[], Any]) -> float:
    """Wall seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def first_calls(name: str, steps: int, options: Result) -> Result:
    """Wall seconds of the first three training steps without proofs, and those of them that records took."""
    model, x = network(name, options["neurons"]), inputs(steps, options["batch"])
    run = reroll.compile(model, start="compiled", proof="never", **options["reroll"])
    step, records, searches = training_step(run, model, x), list[float](), list[float]()
    with timed(Recorded, "record", records), timed(at_length, "capture", searches):
        seconds = [wall(step) for _ in range(3)]
    eager = wall(training_step(model, model, x)) if options["eager"] else None
    return {
        "network": name,
        "steps": steps,
        "first_s": seconds[0],
        "second_s": seconds[1],
        "third_s": seconds[2],
        "record_s": sum(records),
        "search_s": sum(searches),
        "eager_step_s": eager,
    }


def fresh(name: str, steps: int, options: Result) -> Result:
    """``first_calls`` in a process and an inductor cache of its own."""
    with empty_caches() as caches:
        command = [
            sys.executable,
            __file__,
            "--one",
            name,
            "--one-steps",
            str(steps),
            "--one-options",
            json.dumps(options),
        ]
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} at T={steps} failed:\n{done.stderr}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_cost(options: argparse.Namespace, name: str) -> Result:
    """What the first two calls take longer than the third, at the short and at the long length."""
    given = {
        "neurons": options.neurons,
        "batch": options.batch,
        "eager": options.eager,
        "reroll": {"schedule": "standard", "lowering": options.lowering},
    }
    short, long = (fresh(name, steps, given) for steps in options.compile_steps)
    costs = [run["first_s"] + run["second_s"] - 2 * run["third_s"] for run in (short, long)]
    others = [cost - run["record_s"] - run["search_s"] for cost, run in zip(costs, (short, long), strict=True)]
    differences = [run["first_s"] - run["second_s"] for run in (short, long)]
    return {
        "options": given,
        "short": short,
        "long": long,
        "cost_s": costs,
        "ratio": costs[1] / costs[0],
        "ratio_without_records": others[1] / others[0],
        "ratio_of_first_minus_second": differences[1] / differences[0],
        "goal": 1.2,
    }


def long_sequence(options: argparse.Namespace) -> Result:
    """Memory and seconds of one training step of double with disk; plain BPTT's at a shorter length."""
    model = network(NETWORKS[0], options.neurons)
    x = inputs(options.long_steps, options.long_batch)
    short = x[: options.short_steps]
    plain, expected = plain_step(model, short)
    chosen = {
        "schedule": "double",
        "remote": "disk",
        "lowering": options.lowering,
        "spill_folder": options.spill_folder,
    }
    run = reroll.compile(model, start="compiled", **chosen)
    same = short_of(model, run, short, expected)
    report, found = reroll.explain(run, x), long_step(training_step(run, model, x), options.long_steps)
    return {
        "options": chosen,
        "steps": options.long_steps,
        "batch": options.long_batch,
        "neurons": options.neurons,
        "plan": report.loops[0].choice.describe(),
        "plain": plain,
        "double_at_plain_steps": same,
        "predicted_peak_bytes": report.predicted_peak,
        "ratio": report.predicted_peak / plain["local_peak_bytes"],
        "resident_ratio": found["resident_growth_bytes"] / max(plain["resident_growth_bytes"], 1),
        "goal": 1.0,
        **found,
    }


def plain_step(model: nn.Module, x: torch.Tensor) -> tuple[Result, Any]:
    """Memory and seconds of a training step of plain BPTT, and its gradients."""
    step = training_step(model, model, x)
    growth = resident_growth(step)
    expected = gradients(step, model)
    model.zero_grad(set_to_none=True)
    peak = cost_of(step, [model]).local_peak
    return {
        "steps": len(x),
        "local_peak_bytes": peak,
        "resident_growth_bytes": growth,
        "cpu_us_per_time_step": statistics.median(interleaved({"plain": step}, ROUNDS)["plain"]) / len(x) * 1e6,
    }, expected


def short_of(model: nn.Module, run: Any, x: torch.Tensor, expected: Any) -> Result:
    """The compiled model at the length of plain BPTT: its gradients against those, and its memory."""
    step = training_step(run, model, x)
    error = relative_error(gradients(step, model), expected)
    model.zero_grad(set_to_none=True)
    return {
        "relative_error": error,
        "local_peak_bytes": cost_of(step, [model]).local_peak,
        "predicted_peak_bytes": reroll.explain(run, x).predicted_peak,
    }


def long_step(step: Any, steps: int) -> Result:
    """Memory and seconds of the first two training steps at the full length."""
    records, growth = list[float](), list[int]()
    with timed(Recorded, "record", records):
        first = wall(step)
    cpu = time.process_time()
    second = wall(lambda: growth.append(resident_growth(step)))
    cpu = time.process_time() - cpu
    return {
        "resident_growth_bytes": growth[0],
        "first_step_wall_s": first,
        "record_wall_s": sum(records),
        "step_wall_s": second,
        "step_cpu_s": cpu,
        "cpu_us_per_time_step": cpu / steps * 1e6,
    }


def parse(given: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of the part compile, separated by commas")
    parser.add_argument("--lowering", default="inductor", choices=["eager", "inductor"])
    parser.add_argument("--neurons", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="also time a plain training step of each length")
    parser.add_argument("--compile-steps", type=int, nargs=2, default=[64, 16384])
    parser.add_argument("--long-steps", type=int, default=100_000)
    parser.add_argument("--short-steps", type=int, default=1000)
    parser.add_argument("--long-batch", type=int, default=8)
    parser.add_argument("--spill-folder", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lengths.json")
    for hidden in ("--one", "--one-steps", "--one-options"):
        parser.add_argument(hidden, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(given, argparse.Namespace(given=given))
    options.only, options.networks = options.only.split(","), options.networks.split(",")
    if unknown := (set(options.only) - set(PARTS)) | (set(options.networks) - set(NETWORKS)):
        parser.error(f"no such part or network: {', '.join(sorted(unknown))}")
    return options


def main(given: list[str]) -> Result:
    """Measure the parts, save each, and print the result."""
    options = parse(given)
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(first_calls(options.one, int(options.one_steps), json.loads(options.one_options))))
        return {}
    result: Result = json.loads(options.out.read_text()) if options.out.exists() else {}
    parts: dict[str, Callable[[], Result]] = {"long": lambda: long_sequence(options)} if "long" in options.only else {}
    if "compile" in options.only:
        parts |= {f"compile, {name}": lambda name=name: compile_cost(options, name) for name in options.networks}  # type: ignore[misc]
    for key, part in parts.items():
        before = os.getloadavg()
        found = part()
        where = machine(" ".join(["python", "benchmarks/lengths.py", *options.given]))
        result[key] = {**found, "environment": {**where, "load_average": [before, os.getloadavg()]}}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({key: found}, indent=1))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
