"""The study of the paper (its Figures 2 to 5): ``python benchmarks/study.py``.

Bencheikh, Finkbeiner, Neftci (2024), arXiv 2412.11810: time and local peak of every schedule and of plain BPTT against
the length of sequences and the width of networks, over chunks and local checkpoints, and over remote chunks; spiking
networks at the paper's lengths and batches, with widths for this machine. Parts: ``settings``, ``length``, ``width``,
``tenfold`` (ten times the settings' lengths), ``grid``, ``chunk``. A point is saved in ``results/study.json`` as soon
as it is measured; a part that is measured again replaces the old one. Then ``docs/background/study.md`` and the plots
are made anew from the file; ``--show`` does only that. CPU seconds of one thread on one core, contenders in turn; the
allocator's peak above inputs, parameters and their gradients. Gradients are compared with plain BPTT's at every point,
and a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from contenders import EAGER
from measuring import Step, cost_of, gradients, interleaved, machine, pinned, relative_error, summary
from study_plot import draw
from study_points import Contender, Point, points, steps_of
from study_tables import write
from torch import nn

HERE = Path(__file__).resolve().parent
WRONG = 1e-3  # relative: rounding moves a spike here and there, a wrong gradient is off by more
Result = dict[str, Any]


def row(point: Point, core: int | None) -> Result:
    """Everything about one point."""
    load = os.getloadavg()
    network, steps, ours = steps_of(point)
    found = {EAGER: plain(network, steps[EAGER], point)}
    expected = gradients(steps[EAGER], network)
    for name, contender in ours.items():
        found[name] = held(network, contender, expected)
        if not found[name]["relative_error"] < WRONG:
            raise RuntimeError(
                f"{name} of {point} gives wrong gradients: {found[name]['relative_error']:.1e} relative."
            )
    with pinned(core):
        times = summary(interleaved(steps, point.rounds), EAGER)
    network.zero_grad(set_to_none=True)
    return {
        **{key: getattr(point, key) for key in ("network", "steps", "batch", "neurons", "rounds")},
        "load_average": [load, os.getloadavg()],
        "contenders": {name: {**found[name], **times[name]} for name in steps},
    }


def plain(network: nn.Module, step: Step, point: Point) -> Result:
    """The memory of plain BPTT, unless it is left out."""
    network.zero_grad(set_to_none=True)
    return {"local_peak_bytes": cost_of(step, [network]).local_peak if point.plain_memory else None}


def held(network: nn.Module, contender: Contender, expected: list[torch.Tensor]) -> Result:
    """Gradient error, memory and plan; the seconds are predicted before the first step, from segments alone."""
    report = contender.report()
    (loop,) = report.loops
    error = relative_error(gradients(contender, network), expected)
    network.zero_grad(set_to_none=True)
    return {
        "plan": loop.choice.describe(),
        "relative_error": error,
        "local_peak_bytes": cost_of(contender, [network]).local_peak,
        "predicted_peak_bytes": report.predicted_peak,
        "remote_peak_bytes": sum(report.remote_peaks.values()),
        "predicted_s": loop.trace().seconds,
        "steps_run_again": loop.tally.reforward_steps,
    }


def measured(part: str, todo: list[Point], options: argparse.Namespace, result: Result) -> None:
    """Measure a part, and save it after every point."""
    result[part] = {"environment": machine(" ".join(["python", "benchmarks/study.py", *options.given])), "rows": []}
    result[part]["environment"] |= {"lowering": options.lowering, "pinned_to_core": options.core}
    for point in todo:
        begin = time.perf_counter()
        result[part]["rows"].append(row(point, options.core))
        seconds = time.perf_counter() - begin
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{part}: {point.network}, T={point.steps}, {point.neurons} neurons, {seconds:.0f} s", flush=True)


def parse(given: list[str], parts: Mapping[str, object]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts), help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and eager lowering: shows that it runs")
    parser.add_argument("--show", action="store_true", help="measure nothing; page and plots from the result file")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to time on")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "study.json")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "background" / "study.md")
    options = parser.parse_args(given, argparse.Namespace(given=given))
    options.lowering = "eager" if options.quick else "inductor"
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    return options


def main(given: list[str]) -> Result:
    """Measure, and make the page and the plots."""
    options = parse(given, points(False, "inductor"))
    result: Result = json.loads(options.out.read_text()) if options.out.exists() else {}
    with pinned(None):
        for part, todo in points(options.quick, options.lowering).items():
            if part in options.only and not options.show:
                measured(part, todo, options, result)
    write(result, options.page)
    draw(result, options.out.with_suffix(""))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
