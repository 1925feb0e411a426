"""Wall seconds of the backend after Dynamo, for one T in a fresh process: ``compile_cost.py STEPS BATCH LOWERING``.

Prints one JSON object: all seconds of the backend, those of its parts, and the segments that were compiled. Parts are
timed by wrapping the functions that do them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from network_d import NetworkD, inputs
from torch import Tensor, fx

from reroll import explain
from reroll.backends.dynamo import reroll

PARTS = (
    ("normalise", "reroll.capture.capture", "normalise"),
    ("detect", "reroll.capture.capture", "_steps"),
    ("extract", "reroll.capture.capture", "extract"),
    ("trace", "reroll.backends.construct.kernels", "trace"),
    ("lower", "reroll.backends.construct.kernels", "lower"),
    ("program", "reroll.planning.plan", "run"),
    ("program", "reroll.planning.plan", "count"),
    ("program", "reroll.planning.plan", "predict"),
    ("around", "reroll.backends.dynamo.entry", "assemble"),
    ("around", "reroll.backends.dynamo.entry", "compile_surroundings"),
)


def timed(seconds: dict[str, float], part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, adding its wall seconds to those of a part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - begin

    return call


def watch(seconds: dict[str, float]) -> None:
    """Time every part from here on."""
    for part, module_name, name in PARTS:
        module = importlib.import_module(module_name)
        setattr(module, name, timed(seconds, part, getattr(module, name)))


@dataclass
class Backend:
    """``reroll`` as Dynamo calls it; notes how long it took, and how large Dynamo's graph was."""

    options: dict[str, str]
    nodes: int = 0
    seconds: float = 0.0

    def __call__(self, graph: fx.GraphModule, operands: Sequence[Tensor]) -> Callable[..., Any]:
        """Called by Dynamo, once."""
        self.nodes = len(graph.graph.nodes)
        begin = time.perf_counter()
        result = reroll(graph, operands, options=self.options)
        self.seconds = time.perf_counter() - begin
        return result


def main(steps: int, batch: int, lowering: str) -> dict[str, Any]:
    """The cost of one compilation with the default schedule."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network, x, parts = NetworkD(), inputs(steps, batch), defaultdict[str, float](float)
    watch(parts)
    backend = Backend({"lowering": lowering})
    begin = time.perf_counter()
    compiled = torch.compile(network, backend=backend, fullgraph=True, dynamic=False)
    compiled(x)
    whole = time.perf_counter() - begin
    (loop,) = explain(compiled, x).loops
    length, rolled = loop.choice.segment, loop.recurrence.steps
    return {
        "steps": steps,
        "rolled_steps": rolled,
        "segments": [length, rolled % length] if rolled % length else [length],
        "dynamo_nodes": backend.nodes,
        "backend_s": backend.seconds,
        "dynamo_and_first_forward_s": whole - backend.seconds,
        "parts_s": {**parts, "rest": backend.seconds - sum(parts.values())},
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
