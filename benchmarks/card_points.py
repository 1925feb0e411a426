"""The points of ``card.py``: a network, its sizes, and what is compared there, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from contenders import CHECKPOINT, EAGER, SCHEMES
from speed_networks import Convolutional, FeedForward, Gated, Network, Recurrent, Single
from torch import Tensor, nn

RECURRENT, LSTM, FEED_FORWARD, CONVOLUTIONAL = "recurrent LIF", "LSTM", "feed-forward LIF", "convolutional spiking"
SINGLE = "Linear + LIF"
SEGMENTS, CHECKPOINTED_SEGMENTS = "torch.compile segments", "torch.compile segments, checkpoint"
CUDNN, SPIKINGJELLY = "nn.LSTM", "SpikingJelly, Triton"
JAX = ("JAX lax.scan", "JAX nested remat", "equinox, 8 checkpoints")
TWIN = "double (local), as on host"  # the plan of "double (host)", with nothing to move

OURS: Mapping[str, Mapping[str, Any]] = {
    **{name: SCHEMES[name] for name in ("store_all", "standard", "auto")},
    "remote (host)": {"schedule": "remote", "remote": "host"},
    "double (host)": {"schedule": "double", "remote": "host"},
    TWIN: {"schedule": "double", "remote": "local"},
    **{name: SCHEMES[name] for name in ("remote (disk)", "double (disk)")},
    "revolve (8 slots)": {"schedule": "revolve", "slots": 8},
}
THEIRS = (EAGER, CHECKPOINT, SEGMENTS, CHECKPOINTED_SEGMENTS)
FEW = (EAGER, CHECKPOINT, SEGMENTS, "store_all", "standard", "remote (host)", "double (host)", "auto")
EVERYONE = (*THEIRS, *OURS, *JAX)
WIDE = (EAGER, SEGMENTS, "store_all", "standard", "auto", *JAX[:2], SPIKINGJELLY)
LONG = ("double (host)", "store_all", "remote (host)", "standard", "auto", EAGER, CHECKPOINT)
LENGTHS, QUICK_LENGTH = (4_096, 16_384, 65_536), 256


Inputs = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _dense(sizes: tuple[int, ...], numbers: torch.Generator) -> Tensor:
    return torch.randn(sizes, generator=numbers, device=numbers.device)


def _events(sizes: tuple[int, ...], numbers: torch.Generator) -> Tensor:
    return (torch.rand(sizes, generator=numbers, device=numbers.device) < 0.1).float()


# name: (network of so many neurons, its inputs, their sizes at each step behind the batch; none: as many as neurons)
NETWORKS: Mapping[str, tuple[Callable[[int], Network], Inputs, tuple[int, ...]]] = {
    RECURRENT: (lambda neurons: Recurrent(3.0, neurons), _dense, (64,)),
    LSTM: (lambda neurons: Gated(nn.LSTMCell, neurons), _dense, (64,)),
    FEED_FORWARD: (FeedForward, _events, (128,)),
    CONVOLUTIONAL: (lambda _: Convolutional(), _events, (2, 16, 16)),
    SINGLE: (Single, _events, ()),
}


@dataclass(frozen=True)
class Point:
    """A network at a size, and what takes turns there in ``rounds``; none: the seconds are those of the measured step.

    ``lowering`` is that of reroll, and the backend of the compiled segments.
    """

    network: str
    steps: int
    batch: int
    neurons: int
    contenders: tuple[str, ...]
    rounds: int
    lowering: str = "inductor"

    @property
    def key(self) -> str:
        """Its name in the result."""
        return f"{self.network}, T={self.steps:,}"

    def inputs_on(self, device: torch.device) -> Tensor:
        """(T, B, ...), from a fixed seed: normal numbers, or spikes in a tenth of the places."""
        _, made, sizes = NETWORKS[self.network]
        numbers = torch.Generator(device).manual_seed(1)
        return made((self.steps, self.batch, *(sizes or (self.neurons,))), numbers)


def points(quick: bool, networks: Sequence[str], contenders: Sequence[str] | None, most: int) -> list[Point]:
    """The points, in the order of their importance. ``quick``: tiny ones, which show nothing but that all of it runs.

    contenders: only these, if any are named. most: steps of the longest.
    """
    found = [
        Point(RECURRENT, 1_024, 128, 1_024, EVERYONE, 5),
        Point(RECURRENT, LENGTHS[0], 128, 1_024, FEW, 2),
        Point(LSTM, 512, 128, 1_024, (*EVERYONE, CUDNN), 5),
        Point(FEED_FORWARD, 512, 128, 1_024, (*EVERYONE, SPIKINGJELLY), 5),
        Point(CONVOLUTIONAL, 128, 128, 0, EVERYONE, 5),
        Point(SINGLE, 500, 16, 16_384, WIDE, 5),
        *(Point(RECURRENT, steps, 128, 1_024, LONG, 0) for steps in LENGTHS[1:]),
        Point(RECURRENT, 256, 128, 1_024, FEW, 3),
    ]
    if quick:
        found = [small(point) for point in found if point.steps <= LENGTHS[0]]
    chosen = [point for point in found if point.network in networks and point.steps <= most]
    if contenders is None:
        return chosen
    return [replace(point, contenders=tuple(x for x in point.contenders if x in contenders)) for point in chosen]


def small(point: Point) -> Point:
    """The same network at a size that shows nothing."""
    steps = max(point.steps // 32, 24)
    return replace(point, steps=steps, batch=2, neurons=16, rounds=min(point.rounds, 1), lowering="eager")
