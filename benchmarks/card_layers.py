"""``nn.LSTM`` and ``nn.GRU`` on a card: cuDNN over the whole sequence, in pieces of k steps, and reroll's segments.

    python benchmarks/card_layers.py [--out FOLDER] [--seconds 60] [--device cuda]

It answers whether a segment should be lowered to cuDNN's own layer: pieces keep what cuDNN keeps for its backward, so
they are what such a lowering would run. float32 without TF32; milliseconds of a training step on the wall, medians of
rounds in turns; bytes of ``reroll.measure`` without gradients of weights (outputs and their gradients are in them).
Saved as ``card_layers.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from card_meter import meter_of
from card_session import Brief
from measuring import Step, aside, relative_error
from torch import Tensor, nn

import reroll

SIZES: tuple[tuple[Any, int, int, int], ...] = (
    (nn.LSTM, 128, 1_024, 512),
    (nn.LSTM, 32, 256, 512),
    (nn.GRU, 32, 256, 512),
    (nn.GRU, 128, 1_024, 512),
)
"""Layer, batch, neurons, steps; 64 inputs."""
PIECES, SEGMENTS, ROUNDS = (8, 16, 32), (8, 16, 32), 10


class Outputs(nn.Module):
    """The outputs of a layer, (T, B, H), of pieces of ``k`` steps if that is not 0."""

    def __init__(self, layer: nn.LSTM | nn.GRU, k: int = 0) -> None:
        super().__init__()
        self.layer, self.k = layer, k

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Of all steps."""
        if not self.k:
            y_TBH: Tensor = self.layer(x_TBI)[0]
            return y_TBH
        state, found = None, []
        for part in x_TBI.split(self.k):
            y_TBH, state = self.layer(part, state)
            found.append(y_TBH)
        return torch.cat(found)


def ways(layer: nn.LSTM | nn.GRU, lowering: str) -> Mapping[str, Callable[[], Any]]:
    """What is compared, by name."""
    ours = partial(reroll.compile, Outputs(layer), start="compiled", lowering=lowering)
    return {
        "cuDNN": lambda: Outputs(layer),
        **{f"cuDNN, pieces of {k}": partial(Outputs, layer, k) for k in PIECES},
        **{f"reroll, store_all, segments of {k}": partial(ours, schedule="store_all", segment=k) for k in SEGMENTS},
        "reroll, standard": partial(ours, schedule="standard"),
    }


def row(size: tuple[Any, int, int, int], brief: Brief) -> dict[str, Any]:
    """All ways at one size, as far as time allows."""
    kind, batch, neurons, steps = (size[0], 2, 8, 40) if brief.quick else size
    torch.manual_seed(0)
    layer, x_TBI = kind(64, neurons).to(brief.device), torch.randn(steps, batch, 64, device=brief.device)
    meter, runs, found = meter_of(brief.device), dict[str, Step](), dict[str, dict[str, Any]]()
    expected: list[Tensor] = []
    for name, make in ways(layer, "eager" if brief.quick else "inductor").items():
        if brief.over:
            break
        step: Step = partial(trained, make(), layer, x_TBI)
        meter.seconds(step)
        found[name] = {"local_peak_bytes": meter.cost(step, layer).local_peak_bytes}
        given = [each.grad for each in layer.parameters()]
        expected = expected or given
        found[name]["relative_error"] = relative_error(given, expected)
        runs[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with aside():
        for name, step in list(runs.items()) * ROUNDS:
            seconds[name].append(meter.seconds(step))
    for name, each in seconds.items():
        found[name]["ms"] = 1e3 * statistics.median(each)
    return {"layer": kind.__name__, "batch": batch, "neurons": neurons, "steps": steps, "ways": found}


def trained(run: Any, layer: nn.Module, x_TBI: Tensor) -> None:
    """A training step into fresh gradients."""
    layer.zero_grad(set_to_none=True)
    (run(x_TBI) ** 2).mean().backward()


def main(given: list[str]) -> None:
    """Measure, save after each size, and print."""
    torch.backends.cudnn.allow_tf32 = False
    brief = Brief.asked(__doc__, "card_layers", given)
    for size in SIZES:
        if not brief.over:
            found = row(size, brief)
            brief.result.setdefault("rows", []).append(found)
            brief.save()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
