"""What the planner says beforehand, against what is measured: peaks and seconds of training steps, and budgets kept.

    python benchmarks/predictions.py [--networks "GRU cell" ...] [--budgets 0.3 0.1] [--out FILE]

For each network of ``speed.py``: plain BPTT, then reroll without a budget, with budgets in fractions of plain BPTT's
measured peak, and with ``double`` on disk. ``reroll.explain`` is asked at the full length right after it is compiled
(``at_once``), after two training steps at an eighth of the length (``before``), and after training steps at the full
length (``after``). Bytes are the
allocator's, the seconds of recurrences are wall seconds of one pinned core, those of whole steps CPU seconds, medians
of five. Density of spikes is a matter of values, which nothing tells before a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import cost_of, gradients, machine, pinned, relative_error, training_step
from speed_networks import NETWORKS
from torch import Tensor, nn

import reroll
from reroll.errors import BudgetError

HERE = Path(__file__).resolve().parent
ROUNDS = 5


def options_of(plain_peak: int, budgets: Sequence[float]) -> dict[str, dict[str, Any]]:
    """The ways to compile a network, by name."""
    ways: dict[str, dict[str, Any]] = {"auto": {}}
    ways |= {f"budget {share:g}": {"memory_budget": int(share * plain_peak)} for share in budgets}
    return ways | {"double, disk": {"schedule": "double", "remote": "disk"}}


def measured_row(network: nn.Module, x: Tensor, expected: list[Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """What is predicted and what is measured for one way to compile a network."""
    fast = reroll.compile(network, start="compiled", **options)
    try:
        at_once = reroll.explain(fast, x).to_json()
        for _ in range(2):  # the first is slow
            training_step(fast, network, x[: x.shape[0] // 8])()
        before = reroll.explain(fast, x).to_json()
    except BudgetError as error:
        return {"refused": str(error), "least_bytes": error.nbytes}
    step = training_step(fast, network, x)
    differing = relative_error(gradients(step, network), expected)
    network.zero_grad()
    costs, recurrences = [], []
    for _ in range(ROUNDS):
        network.zero_grad()
        costs.append(cost_of(step, [network]))
        recurrences.append(sum(loop.measured_seconds or 0.0 for loop in reroll.explain(fast, x).loops))
    after = reroll.explain(fast, x).to_json()
    peak, seconds = costs[0].local_peak, statistics.median(recurrences)
    return {
        "plan": reroll.explain(fast, x).loops[0].choice.describe(),
        "budget_bytes": options.get("memory_budget"),
        "predicted_peak_bytes": before["predicted_peak_bytes"],
        "local_peak_bytes": peak,
        "peak_ratio": before["predicted_peak_bytes"] / peak,
        "predicted_at_once_s": at_once["predicted_seconds"],
        "predicted_before_s": before["predicted_seconds"],
        "predicted_after_s": after["predicted_seconds"],
        "measured_s": seconds,
        "seconds_ratio_at_once": (at_once["predicted_seconds"] or 0) / seconds,
        "seconds_ratio_before": (before["predicted_seconds"] or 0) / seconds,
        "seconds_ratio_after": (after["predicted_seconds"] or 0) / seconds,
        "step_cpu_s": statistics.median(cost.seconds for cost in costs),
        "relative_error": differing,
    }


def network_rows(name: str, budgets: Sequence[float], shorter: int) -> dict[str, Any]:
    """The rows of a network."""
    make, inputs, steps = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make(), inputs(max(steps // shorter, 16))
    plain = training_step(network, network, x)
    expected = gradients(plain, network)
    network.zero_grad()
    cost = min((cost_of(plain, [network]) for _ in range(3)), key=lambda each: each.seconds)
    rows: dict[str, Any] = {
        "steps": x.shape[0],
        "plain": {"local_peak_bytes": cost.local_peak, "step_cpu_s": cost.seconds},
    }
    for way, options in options_of(cost.local_peak, budgets).items():
        rows[way] = measured_row(network, x, expected, options)
        print(f"{name}, {way}: {json.dumps(rows[way])}", flush=True)
        torch.compiler.reset()
    return rows


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.3, 0.1])
    parser.add_argument("--shorter", type=int, default=1, help="divide the usual number of steps by this")
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "predictions.json")
    given = parser.parse_args(arguments)
    budgets = " ".join(f"{each:g}" for each in given.budgets)
    command = f"python benchmarks/predictions.py --budgets {budgets} --shorter {given.shorter} --core {given.core}"
    found: dict[str, Any] = {"networks": {}}
    if given.out.exists():
        found["networks"] = json.loads(given.out.read_text())["networks"]
    with pinned(given.core):
        found["environment"] = machine(command)
        for name in given.networks:
            found["networks"][name] = network_rows(name, given.budgets, given.shorter)
            found["environment"]["load_average"] = os.getloadavg()
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
