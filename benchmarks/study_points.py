"""The points of ``study.py``: a network, its sizes, and what is compared there.

Lengths and batches are those of the paper that ``docs/background/study.md`` names; widths are of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from contenders import EAGER, SCHEMES
from measuring import Step, training_step
from speed_networks import FeedForward, Network, Recurrent
from torch import Tensor

import reroll
from reroll.backends.construct.build import Known
from reroll.backends.construct.kernels import Kernels
from reroll.recurrence import Recurrence
from reroll.report.report import Report

NETWORKS: Mapping[str, tuple[Callable[[int], Network], int]] = {
    "recurrent": (lambda neurons: Recurrent(3.0, neurons), 64),
    "feed-forward": (FeedForward, 128),
}
ALL: Mapping[str, Mapping[str, Any]] = {**SCHEMES, "revolve (8 slots)": {"schedule": "revolve", "slots": 8}}
FEW = {name: ALL[name] for name in ("standard", "double (disk)")}
LENGTHS, WIDTHS, NEURONS, BATCH = (100, 300, 500, 900, 3000), (64, 128, 256, 512), 128, 60
SETTINGS = ((300, 60), (128, 120), (500, 60), (900, 60))  # (T, batch); the paper's, as far as it gives both
CHUNKS, SLOTS, SEGMENT = (16, 32, 64, 128, 256), (2, 4, 8, 16), 4  # of the grids; steps
REMOTE_CHUNKS = (4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Point:
    """A network at a size, and the options of reroll that take turns with plain BPTT there.

    ``plain_memory``: whether plain BPTT's memory is measured too (the profiler takes longer than the step).
    """

    network: str
    steps: int
    batch: int
    neurons: int
    contenders: Mapping[str, Mapping[str, Any]]
    rounds: int
    plain_memory: bool = True


def points(quick: bool, lowering: str) -> dict[str, list[Point]]:
    """The points of every part. ``quick``: tiny ones, which show nothing but that the study runs."""
    parts = {
        "settings": [Point(net, 128, 120, NEURONS, ALL, 5) for net in NETWORKS],
        "length": [Point(net, steps, BATCH, NEURONS, ALL, _rounds(steps)) for net in NETWORKS for steps in LENGTHS],
        "width": [Point("recurrent", 300, BATCH, neurons, ALL, 3) for neurons in WIDTHS]
        + [Point("feed-forward", 300, BATCH, neurons, ALL, 3) for neurons in (WIDTHS[1], WIDTHS[3])],
        "tenfold": [Point(net, 10 * t, b, NEURONS, FEW, 1, False) for net in NETWORKS for t, b in SETTINGS if t != 300],
        "grid": [Point("recurrent", 500, BATCH, NEURONS, grid(), 2)],
        "chunk": [Point("recurrent", 500, BATCH, NEURONS, remote_chunks(), 3)],
    }
    if quick:
        parts = {name: [_small(point, index) for index, point in enumerate(each)] for name, each in parts.items()}
    return {name: [_lowered(point, lowering) for point in each] for name, each in parts.items()}


def _rounds(steps: int) -> int:
    return 5 if steps < 900 else 3 if steps < 3000 else 2


def grid() -> dict[str, dict[str, Any]]:
    """Chunks of C steps with K local checkpoints, for the two schedules that have both."""
    return {
        f"{name}, C={chunk}, K={slots}": _remote(name, chunk, slots=slots)
        for name in ("hierarchical", "double")
        for chunk in CHUNKS
        for slots in SLOTS
        if slots * SEGMENT <= chunk
    }


def remote_chunks() -> dict[str, dict[str, Any]]:
    """Chunks of C steps whose first carries go to disk."""
    return {f"remote, C={chunk}": _remote("remote", chunk) for chunk in REMOTE_CHUNKS}


def _remote(name: str, chunk: int, **more: int) -> dict[str, Any]:
    return {"schedule": name, "remote": "disk", "segment": SEGMENT, "chunk": chunk, **more}


def _small(point: Point, index: int) -> Point:
    few = dict(list(point.contenders.items())[:: 3 if len(point.contenders) > len(FEW) else 1])
    steps = 64 + 8 * (index % 5)
    return replace(point, contenders=few, steps=steps, batch=2, neurons=point.neurons // 16, rounds=1)


def _lowered(point: Point, lowering: str) -> Point:
    contenders = {name: {**options, "lowering": lowering} for name, options in point.contenders.items()}
    return replace(point, contenders=contenders)


class Shared(Known):
    """A network whose segments are compiled once for all schedules: these differ in programs, not in what they play.

    ``reroll.compile`` makes the same segments for each of these schedules; here they are made once, which saves
    minutes. ``replay`` is of the segments: only ``auto`` takes those that replay spikes.
    """

    def __init__(self, network: Network, replay: bool | str, lowering: str) -> None:
        super().__init__()
        self.network, self.replay, self.compiled = network, replay, dict[Any, Any]()
        schedule = "auto" if replay == "auto" else "store_all"
        self.options = reroll.Options.of(
            {"schedule": schedule, "replay": replay, "lowering": lowering, "start": "compiled"}
        )

    def kernels(
        self, what: Any, recurrence: Recurrence, lengths: Sequence[int], loops: int, options: reroll.Options
    ) -> Kernels:
        """Segments of some lengths, which no schedule changes."""
        return super().kernels(what, recurrence, lengths, loops, self.options)

    def under(self, options: Mapping[str, Any]) -> Any:
        """The compiled network under some options."""
        key = tuple(sorted(options.items()))
        if key not in self.compiled:
            made = reroll.compile(self.network, **{"start": "compiled", "replay": self.replay, **options})
            vars(made.reroll_caller.at_length).update(known=self)
            self.compiled[key] = made
        return self.compiled[key]


@cache
def shared(kind: str, neurons: int, batch: int, replay: bool | str, lowering: str) -> Shared:
    """A network of this kind and size, compiled at its first use and shared by all that have the same ``replay``."""
    del batch  # another batch is another compilation
    return Shared(network_of(kind, neurons), replay, lowering)


@cache
def network_of(kind: str, neurons: int) -> Network:
    """The network, from a fixed seed."""
    torch.manual_seed(0)
    return NETWORKS[kind][0](neurons)


def inputs_of(point: Point) -> Tensor:
    """Normal numbers (T, B, I), or for the layers without recurrence spikes in a tenth of the places."""
    size = point.steps, point.batch, NETWORKS[point.network][1]
    generator = torch.Generator().manual_seed(1)
    if point.network == "recurrent":
        return torch.randn(size, generator=generator)
    return (torch.rand(size, generator=generator) < 0.1).float()


@dataclass(frozen=True)
class Contender:
    """A training step of the network of a point under some options."""

    shared: Shared
    options: Mapping[str, Any]
    x: Tensor

    def __call__(self) -> None:
        """Forward and backward into fresh gradients."""
        training_step(self.shared.under(self.options), self.shared.network, self.x)()

    def report(self) -> Report:
        """What ``reroll.explain`` says of it."""
        return reroll.explain(self.shared.under(self.options), self.x)


def steps_of(point: Point) -> tuple[Network, dict[str, Step], dict[str, Contender]]:
    """The network of a point, the training step of every contender, and those of reroll."""
    network, x = network_of(point.network, point.neurons), inputs_of(point)
    ours = {}
    for name, options in point.contenders.items():
        replay = "auto" if options.get("schedule", "auto") == "auto" else False
        made = shared(point.network, point.neurons, point.batch, replay, str(options["lowering"]))
        ours[name] = Contender(made, options, x)
    return network, {EAGER: training_step(network, network, x), **ours}, ours
