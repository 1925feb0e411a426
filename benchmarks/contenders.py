"""What is compared: plain BPTT, ``torch.utils.checkpoint``, and reroll with every schedule and both lowerings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll import explain
from reroll.backends.dynamo import reroll
from reroll.report.report import Loop

EAGER, CHECKPOINT = "eager BPTT", "torch.utils.checkpoint"
SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "auto": {},
    "store_all": {"schedule": "store_all", "replay": False},
    "standard": {"schedule": "standard"},
    "remote (disk)": {"schedule": "remote", "remote": "disk"},
    "hierarchical (disk)": {"schedule": "hierarchical", "remote": "disk"},
    "double (disk)": {"schedule": "double", "remote": "disk"},
    "double (local)": {"schedule": "double", "remote": "local"},
}


class Several:
    """A torch.compile backend that compiles Dynamo's graph once for each set of options, and calls the chosen one.

    Dynamo's walk through the loop takes longer than everything after it, so it is done once for all contenders.
    """

    def __init__(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        self.options = dict(options)
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.chosen = next(iter(self.options))

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Called by Dynamo, once."""
        if self.compiled:
            raise RuntimeError("Dynamo compiled twice: the loop was broken into several graphs, or guards failed.")
        self.compiled = {name: reroll(graph, inputs, options=options) for name, options in self.options.items()}
        return lambda *operands: self.compiled[self.chosen](*operands)


def named_options(lowerings: Sequence[str], spill_folder: str | None) -> dict[str, dict[str, Any]]:
    """The options of every contender of reroll."""
    found = {}
    for lowering in lowerings:
        for scheme, options in SCHEMES.items():
            folder = {"spill_folder": spill_folder} if spill_folder and options.get("remote") == "disk" else {}
            found[f"{scheme}, {lowering}"] = {**options, **folder, "lowering": lowering}
    return found


@dataclass(frozen=True)
class Contender:
    """A network compiled with one set of options."""

    name: str
    several: Several
    compiled: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Run it."""
        self.several.chosen = self.name
        return self.compiled(x)

    def plan(self, x: Tensor) -> Loop:
        """What ``reroll.explain`` says of its one recurrence."""
        self.several.chosen = self.name
        (loop,) = explain(self.compiled, x).loops
        return loop

    def described(self, x: Tensor) -> dict[str, Any]:
        """The plan in words and numbers."""
        loop = self.plan(x)
        length, steps = loop.choice.segment, loop.recurrence.steps
        return {
            "plan": loop.choice.describe(),
            "rolled_steps": steps,
            "segments": [length, steps % length] if steps % length else [length],
            "predicted_peak_bytes": explain(self.compiled, x).predicted_peak,
            "carries_to_remote": loop.tally.carries_written,
            "steps_run_again": loop.tally.reforward_steps,
            "saved_bytes_per_step": loop.tape_step,
        }


def contenders(network: nn.Module, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Contender]:
    """One contender per set of options, over one compiled network."""
    torch.compiler.reset()
    several = Several(options)
    compiled = torch.compile(network, backend=several, fullgraph=True, dynamic=False)
    return {name: Contender(name, several, compiled) for name in options}
