"""Memory against time of the contenders of ``speed.py`` and ``card.py``, a panel for each network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Styles = Mapping[str, tuple[str, str]]
SHOWN: Styles = {
    "eager BPTT": ("black", "o"),
    "torch.utils.checkpoint": ("tab:gray", "s"),
    "inductor segments, checkpoint": ("tab:gray", "D"),
    "JAX lax.scan": ("tab:orange", "o"),
    "JAX nested remat": ("tab:orange", "s"),
    "equinox, 8 checkpoints": ("tab:orange", "D"),
    "reroll": ("tab:blue", "o"),
    "reroll, standard": ("tab:blue", "s"),
    "reroll, double (disk)": ("tab:blue", "D"),
}


def draw(
    result: dict[str, Any], path: Path, shown: Styles = SHOWN, time: str = "CPU time, eager = 1", within: str = ""
) -> None:
    """One panel a network: local peak (MB, logarithmic) and time; lower left is better.

    shown: colour and marker by contender; each has ``local_peak_bytes`` and ``median_ratio``. time: what the ratio is.
    within: where it is given, time is logarithmic, too, and a curve goes through the contenders whose names begin so.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(len(result), 4)
    rows = math.ceil(len(result) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3.4 * rows + 0.6), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (name, each) in zip(axes.flat, result.items(), strict=False):
        axis.set_visible(True)
        for who, (colour, marker) in shown.items():
            if who in each["contenders"]:
                of = each["contenders"][who]
                axis.scatter(of["local_peak_bytes"] / 1e6, of["median_ratio"], color=colour, marker=marker, label=who)
        axis.set_xscale("log")
        _label_plainly(axis.xaxis, (1, 3))
        if within:
            points = [of for who, of in each["contenders"].items() if who.startswith(within) or who == "reroll"]
            places = sorted((of["local_peak_bytes"] / 1e6, of["median_ratio"]) for of in points)
            axis.plot(*zip(*places, strict=True), color="tab:blue", marker=".", label="reroll, by budget")
            axis.set_yscale("log")
            _label_plainly(axis.yaxis, (1, 2, 5))
        axis.axhline(1, color="black", linewidth=0.5)
        if not within:
            axis.set_ylim(bottom=0)
        axis.set_title(f"{name}, T={each['steps']:,}", fontsize=9)
        axis.set_xlabel("local peak, MB")
        axis.set_ylabel(time)
    named = {label: each for axis in axes.flat for each, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    width = min(2 * columns, 5)
    figure.legend(named.values(), named, loc="lower center", ncol=width, fontsize=8)
    below = 0.2 + 0.2 * math.ceil(len(named) / width)  # inches
    figure.tight_layout(rect=(0, below / (3.4 * rows + below), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label_plainly(axis: Any, at: tuple[int, ...]) -> None:
    """Write the numbers of a logarithmic axis as they are read, at some multiples of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=at))
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.set_minor_formatter(NullFormatter())
