"""What a record of a model costs as T grows: ``python benchmarks/records.py``.

Network D2r, its forward in eager, a record of it in which runs that repeat are left out (*folded*, as
``reroll.compile`` makes it), and one of all runs (*written*), then the search for the loop in each.
CPU seconds, one thread pinned to a core, medians of rounds that take turns; ``nodes`` is how large a record is. What a
record takes more where it notes which code runs, a fifth, is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, machine, pinned
from network_d import NetworkD, inputs

from reroll.capture.capture import capture
from reroll.capture.recorder.graph import GraphRecorder

RESULT = Path(__file__).resolve().parent / "results" / "records.json"
LENGTHS, BATCH, ROUNDS = (100, 1_000), 32, 5
KINDS = {"folded": True, "written": False}


def record(network: torch.nn.Module, x: torch.Tensor, folds: bool) -> torch.fx.GraphModule:
    """A record of the network's forward."""
    recorder = GraphRecorder([x, *network.parameters()], {}, folds=folds)
    with recorder.recording():
        y = network(x)
    return recorder.finish([y])[0]


def timed(function: Callable[..., Any], *given: Any) -> Callable[[], None]:
    """A call whose result is let go."""

    def call() -> None:
        function(*given)

    return call


def row(steps: int, batch: int, neurons: int, rounds: int) -> dict[str, Any]:
    """The seconds and sizes at one number of steps."""
    torch.manual_seed(0)
    network, x = NetworkD(neurons), inputs(steps, batch)
    made = {kind: record(network, x, folds) for kind, folds in KINDS.items()}
    runs = {"eager": timed(network, x)}
    runs |= {kind: timed(record, network, x, folds) for kind, folds in KINDS.items()}
    runs |= {f"search, {kind}": timed(capture, each) for kind, each in made.items()}
    seconds = {name: statistics.median(each) for name, each in interleaved(runs, rounds).items()}
    return {"seconds": seconds, "nodes": {kind: len(each.graph.nodes) for kind, each in made.items()}}


def main(given: list[str] | None = None) -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--neurons", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(given)
    with pinned(0):
        rows = {str(steps): row(steps, options.batch, options.neurons, options.rounds) for steps in options.lengths}
        told = machine(" ".join(["python benchmarks/records.py", *(sys.argv[1:] if given is None else given)]))
    options.out.write_text(json.dumps({"rows": rows, **told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
