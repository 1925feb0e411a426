"""Live bytes over one call, and a picture of them."""

import os
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Curve = tuple[list[float], list[float]]
COLOURS = ("#b5443b", "#2b6c8f")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of torch 2.13 announces its starts and stops below that


def live_bytes(call: Callable[[], object]) -> Curve:
    """Milliseconds (of the profiler too) and megabytes above the start, at each allocation and release."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    traced: Any = profiler.profiler
    events = [event for event in traced.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    times = [(event.start_ns() - events[0].start_ns()) / 1e6 for event in events]
    return times, list(accumulate(event.nbytes() / 1e6 for event in events))


def draw(axes: Axes, curve: Curve, colour: str, label: str) -> None:
    times, held = curve
    peak = max(held)
    late = held.index(peak) > 0.8 * len(held)
    axes.fill_between(times, held, step="post", color=colour, alpha=0.25, linewidth=0)
    axes.step(times, held, where="post", color=colour, linewidth=0.6)
    axes.annotate(
        f"{label}: {peak:.3g} MB",
        (times[held.index(peak)], peak),
        (0, 5),
        textcoords="offset points",
        color=colour,
        ha="right" if late else "center",
    )


def plot(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Both curves in one frame, and the second (the small one) again in a frame of its own."""
    figure, (both, small) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (label, curve), colour in zip(curves.items(), COLOURS, strict=True):
        draw(both, curve, colour, label)
    label, curve = list(curves.items())[1]
    draw(small, curve, COLOURS[1], label)
    both.set_ylabel("memory held (MB), parameter gradients included")
    both.set_title(title, loc="left", fontsize=10)
    small.set_title(f"{label} alone, on its own scale", loc="left", fontsize=10)
    for axes in (both, small):
        axes.set_xlabel("time in one training step (ms, profiled)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.set_xlim(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_path(truth_T2: Tensor, learned_T2: Tensor, curves: Mapping[str, Curve], path: Path) -> None:
    """A trajectory in the plane with what was learned of it, and beside them the curves."""
    figure, (plane, memory) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    plane.plot(*truth_T2.T, color="0.8", linewidth=5, label="truth")
    plane.plot(*learned_T2.T, color=COLOURS[1], label="learned")
    plane.legend(frameon=False)
    for (label, curve), colour in zip(curves.items(), COLOURS, strict=True):
        draw(memory, curve, colour, label)
    memory.set(xlabel="time in one training step (ms, profiled)", ylabel="memory held (MB)", xlim=0)
    memory.set_ylim(0, memory.get_ylim()[1] * 1.08)
    for axes in (plane, memory):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
