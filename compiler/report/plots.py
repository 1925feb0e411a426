"""A report as a picture, by matplotlib (the extra ``demos`` brings it)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reroll.errors import UnsupportedError
from reroll.planning.alternative import Alternative, pareto
from reroll.program.timeline import Timeline
from reroll.program.timeline_summary import coarser
from reroll.report.page.charts import KINDS
from reroll.words.units import nbytes_text

if TYPE_CHECKING:
    from reroll.report.report import Loop, Report

POINTS = 4_000
COLOURS = {"advance": "#0072b2", "recompute": "#56b4e9", "tape": "#e69f00", "backward": "#d55e00"}
TIER_COLOURS = {"local": "#009e73", "disk": "#cc79a7", "host": "#6a5bb5"}
SOFT = "#5f6670"


def plot(report: Report, path: str | Path) -> None:
    """Write a picture of each recurrence: memory of each tier, the schedule, and the alternatives if there are any.

    The ending of ``path`` says the format. Raises UnsupportedError without matplotlib, and without a recurrence.
    """
    if not report.loops:
        raise UnsupportedError(f"There is nothing to plot: no recurrence was found ({report.reason}).")
    traces = [coarser(loop.trace(), POINTS) for loop in report.loops]
    rows = max(len(trace.memory) for trace in traces) + 1 + any(loop.alternatives for loop in report.loops)
    figure = _figure((9.0 * len(traces), 2.4 * rows + 1.5))
    grid = figure.subplots(rows, len(traces), squeeze=False)
    for column, (loop, trace) in enumerate(zip(report.loops, traces, strict=True)):
        _draw(grid[:, column], loop, trace)
    figure.savefig(path, dpi=150)


def _figure(size: tuple[float, float]) -> Any:
    """A figure that belongs to no window: no backend is chosen."""
    try:
        module = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "report.plot draws with matplotlib, which is not installed. Install it with 'pip install matplotlib', or "
            "write a page with report.save_html(path), which needs nothing."
        ) from error
    return module.Figure(figsize=size, layout="constrained")


def _draw(axes: Sequence[Any], loop: Loop, trace: Timeline) -> None:
    title = f"{loop.recurrence.name}: {loop.choice.describe()}"
    axes[0].set_title(title, loc="left", fontsize=10)
    unit = "forward steps" if trace.nominal else "seconds"
    for number, tier in enumerate(trace.memory):
        _memory(axes[number], trace, tier, loop.budget if tier == "local" else None)
        axes[number].set_xlabel("")
    schedule = axes[len(trace.memory)]
    _schedule(schedule, trace)
    schedule.set_xlabel(f"time ({unit})")
    rest = list(axes[len(trace.memory) + 1 :])
    if loop.alternatives:
        _curve(rest.pop(0), loop.alternatives)
    for unused in rest:
        unused.set_axis_off()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)


def _memory(axes: Any, trace: Timeline, tier: str, budget: int | None) -> None:
    times, held = [*trace.times, trace.seconds], [each / 2**20 for each in (*trace.memory[tier], 0)]
    colour = TIER_COLOURS.get(tier, SOFT)
    axes.fill_between(times, held, step="post", color=colour, alpha=0.2, linewidth=0)
    axes.step(times, held, where="post", color=colour, linewidth=0.9)
    if budget is not None and budget <= 3 * trace.peak(tier):
        axes.axhline(budget / 2**20, color="black", linewidth=0.9, linestyle="--", label="budget")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.axvline(trace.turn, color=SOFT, linewidth=0.8, linestyle=":")
    axes.set_ylabel(f"{tier} (MiB)")
    axes.set_xlim(0, trace.seconds)
    axes.set_ylim(0)
    axes.annotate(
        f"at most {nbytes_text(trace.peak(tier))}",
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="bottom",
        fontsize=8,
    )


def _schedule(axes: Any, trace: Timeline) -> None:
    """Steps over time, in the manner of Figure 1 of arXiv 2412.11810."""
    for tier in trace.memory:
        stays = [stay for stay in trace.stays if stay.tier == tier]
        if stays:
            steps, begins, ends = zip(*((stay.step, stay.begin, stay.end) for stay in stays), strict=True)
            colour = TIER_COLOURS.get(tier, SOFT)
            axes.hlines(steps, begins, ends, color=colour, linewidth=0.6, alpha=0.6, label=f"carry kept, {tier}")
    for kind in ("tape", "advance", "recompute", "backward"):
        xs: list[float] = []
        ys: list[float] = []
        for event in trace.events:
            if event.kind == kind:
                ends = (event.stop, event.start) if kind == "backward" else (event.start, event.stop)
                xs += [event.begin, event.end, float("nan")]
                ys += [*ends, float("nan")]
        if xs:
            width = 3.2 if kind == "tape" else 1.4
            axes.plot(xs, ys, color=COLOURS[kind], linewidth=width, label=KINDS[kind], solid_capstyle="butt")
    axes.axvline(trace.turn, color=SOFT, linewidth=0.8, linestyle=":")
    axes.set_ylabel("step")
    axes.set_xlim(0, trace.seconds)
    axes.set_ylim(0, trace.steps)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _curve(axes: Any, alternatives: Sequence[Alternative]) -> None:
    best = pareto(alternatives)
    for each in alternatives:
        colour = COLOURS["backward"] if each.chosen else COLOURS["advance"] if each in best else SOFT
        axes.plot(each.seconds, each.peak / 2**20, "o", color=colour, markersize=9 if each.chosen else 5)
        if each.chosen:
            place = (each.seconds, each.peak / 2**20)
            axes.annotate(each.name, place, (8, 6), textcoords="offset points", fontsize=8)
    line = [(each.seconds, each.peak / 2**20) for each in best]
    axes.plot(*zip(*line, strict=True), color=COLOURS["advance"], linewidth=0.9)
    axes.set_yscale("log")
    axes.set_xlabel("predicted seconds")
    axes.set_ylabel("local peak (MiB)")
