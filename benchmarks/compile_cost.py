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
from typing import Any

import torch
from contenders import Several, compiled_models
from network_d import NetworkD, inputs

PARTS = (
    ("normalise", "reroll.capture", "normalise"),
    ("detect", "reroll.capture", "_steps"),
    ("extract", "reroll.capture", "extract"),
    ("trace", "reroll.backends.build", "trace"),
    ("lower", "reroll.backends.build", "lower"),
    ("program", "reroll.backends.build", "run"),
    ("program", "reroll.backends.build", "verify"),
    ("assemble", "reroll.backends.dynamo", "assemble"),
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


class Timed(Several):
    """A backend that notes how long it took, and how large Dynamo's graph was."""

    def __call__(self, graph: Any, operands: Sequence[Any]) -> Callable[..., Any]:
        """Called by Dynamo, once."""
        self.nodes = len(graph.graph.nodes)
        begin = time.perf_counter()
        result = super().__call__(graph, operands)
        self.seconds = time.perf_counter() - begin
        return result


def main(steps: int, batch: int, lowering: str) -> dict[str, Any]:
    """The cost of one compilation with the default schedule."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network, parts = NetworkD(), defaultdict[str, float](float)
    watch(parts)
    backend = Timed({"default": {"lowering": lowering}})
    begin = time.perf_counter()
    compiled_models(network, backend)["default"](inputs(steps, batch))
    whole = time.perf_counter() - begin
    compiled: Any = backend.compiled["default"]
    return {
        "steps": steps,
        "rolled_steps": compiled.recurrence_0.executable.recurrence.steps,
        "segments": backend.segments("default"),
        "dynamo_nodes": backend.nodes,
        "backend_s": backend.seconds,
        "dynamo_and_first_forward_s": whole - backend.seconds,
        "parts_s": {**parts, "rest": backend.seconds - sum(parts.values())},
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
