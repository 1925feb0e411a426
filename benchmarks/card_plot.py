"""The plots of ``card.py``, beside its result: time against memory by network, and time of a step against length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from card_points import CHECKPOINTED_SEGMENTS, CUDNN, SEGMENTS, SPIKINGJELLY
from contenders import CHECKPOINT, EAGER
from speed_plot import Styles, draw

SHOWN: Styles = {
    EAGER: ("black", "o"),
    CHECKPOINT: ("tab:gray", "s"),
    SEGMENTS: ("tab:purple", "o"),
    CHECKPOINTED_SEGMENTS: ("tab:purple", "s"),
    CUDNN: ("tab:green", "o"),
    SPIKINGJELLY: ("tab:green", "s"),
    "JAX lax.scan": ("tab:orange", "o"),
    "JAX nested remat": ("tab:orange", "s"),
    "equinox, 8 checkpoints": ("tab:orange", "D"),
    "store_all": ("tab:blue", "o"),
    "auto": ("tab:blue", "*"),
    "standard": ("tab:blue", "s"),
    "remote (host)": ("tab:blue", "^"),
    "double (host)": ("tab:blue", "D"),
    "remote (disk)": ("tab:cyan", "^"),
    "double (disk)": ("tab:cyan", "D"),
    "revolve (8 slots)": ("tab:blue", "P"),
}


def draw_all(result: dict[str, Any], path: Path) -> None:
    """Beside ``path``: ``..._memory.png`` and ``..._length.png``; nothing of what was not measured."""
    rows = result["figures"]["rows"]
    panels: dict[str, Any] = {}
    for key, row in rows.items():
        point = result["points"][key]
        compared = {name: each for name, each in row.items() if each["median_ratio"] is not None}
        if compared:  # of several lengths the first
            panels.setdefault(point["network"], {"steps": point["steps"], "contenders": compared})
    if panels:
        draw(panels, path.with_name(f"{path.stem}_memory.png"), SHOWN, "time, eager = 1")
    if result["figures"]["per_step_us"]:
        _lengths(result["figures"]["per_step_us"], path.with_name(f"{path.stem}_length.png"))


def _lengths(per_step: dict[str, dict[str, float]], path: Path) -> None:
    """Microseconds of a time step against T, both logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5))
    for name, (colour, marker) in SHOWN.items():
        points = sorted((int(steps), us) for steps, us in per_step.get(name, {}).items())
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name)
    axis.set(xscale="log", yscale="log", xlabel="steps T", ylabel="time of a step, us")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
