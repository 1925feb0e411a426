"""What is compared: plain BPTT, ``torch.utils.checkpoint``, and reroll with every schedule and both lowerings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll.backends.dynamo import reroll

EAGER, CHECKPOINT = "eager BPTT", "torch.utils.checkpoint"
SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "store_all": {"schedule": "store_all"},
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

    def segments(self, name: str) -> list[int]:
        """The lengths of the compiled segments of a contender."""
        compiled: Any = self.compiled[name]
        return sorted(compiled.recurrence_0.executable.segments, reverse=True)


def named_options(lowerings: Sequence[str], spill_folder: str | None) -> dict[str, dict[str, Any]]:
    """The options of every contender of reroll."""
    found = {}
    for lowering in lowerings:
        for scheme, options in SCHEMES.items():
            folder = {"spill_folder": spill_folder} if spill_folder and options.get("remote") == "disk" else {}
            found[f"{scheme}, {lowering}"] = {**options, **folder, "lowering": lowering}
    return found


def compiled_models(network: nn.Module, several: Several) -> dict[str, Callable[[Tensor], Tensor]]:
    """One callable per contender of reroll, over one compiled network."""
    torch.compiler.reset()
    compiled = torch.compile(network, backend=several, fullgraph=True, dynamic=False)

    def choose(name: str) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            several.chosen = name
            result: Tensor = compiled(x)
            return result

        return call

    return {name: choose(name) for name in several.options}
