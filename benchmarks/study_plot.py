"""The plots of a result of ``study.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contenders import EAGER
from study_claims import rows_of

Result = dict[str, Any]
STYLES: Mapping[str, tuple[str, str]] = {
    EAGER: ("black", "o"),
    "auto": ("tab:purple", "P"),
    "store_all": ("tab:gray", "s"),
    "standard": ("tab:blue", "^"),
    "remote (disk)": ("tab:orange", "v"),
    "hierarchical (disk)": ("tab:green", "D"),
    "double (disk)": ("tab:red", "o"),
    "double (local)": ("tab:pink", "X"),
    "revolve (8 slots)": ("tab:cyan", "*"),
}
NETS = ("recurrent", "feed-forward")


def draw(result: Result, stem: Path) -> None:
    """A picture for each part that was measured: ``<stem>_length.png`` and so on."""
    import matplotlib as mpl

    mpl.use("Agg")
    pictures: dict[str, Callable[[Any, Result], Any]] = {
        "length": _length,
        "width": _width,
        "grid": _grid,
        "chunk": _chunk,
    }
    from matplotlib import pyplot as plt

    for name, picture in pictures.items():
        if result.get(name, {}).get("rows"):
            figure = picture(plt, result)
            figure.tight_layout(rect=(0, 0.08, 1, 1) if name in ("length", "width") else None)
            figure.savefig(f"{stem}_{name}.png", dpi=110)
            plt.close(figure)


def _length(plt: Any, result: Result) -> Any:
    return _against(plt, result, "length", "steps", "T, steps")


def _width(plt: Any, result: Result) -> Any:
    return _against(plt, result, "width", "neurons", "neurons of a layer")


def _against(plt: Any, result: Result, part: str, key: str, label: str) -> Any:
    """Local peak (both axes logarithmic) and time relative to plain BPTT's, a column for each kind of network."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), squeeze=False)
    for column, net in enumerate(NETS):
        rows = sorted(rows_of(result, net, part), key=lambda row: int(row[key]))
        for name, (colour, marker) in STYLES.items():
            for axis, of in ((axes[0][column], _peak_of), (axes[1][column], _ratio_of)):
                pairs = [(row[key], of(row["contenders"][name])) for row in rows if name in row["contenders"]]
                pairs = [(x, y) for x, y in pairs if y is not None]
                axis.plot(*zip(*pairs, strict=True) if pairs else ((), ()), color=colour, marker=marker, label=name)
        sizes = f", T={rows[0]['steps']:,}" if rows and key == "neurons" else ""
        axes[0][column].set_title(f"{net}{sizes}" + (f", batch {rows[0]['batch']}" if rows else ""))
        axes[0][column].set(xscale="log", yscale="log", xlabel=label, ylabel="local peak, MB")
        axes[1][column].set(xscale="log", xlabel=label, ylabel="CPU time, plain BPTT = 1")
        axes[1][column].set_ylim(bottom=0)
        for axis in (axes[0][column], axes[1][column]):
            axis.set_xticks([row[key] for row in rows], [f"{row[key]:,}" for row in rows])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncol=5, fontsize=9)
    return figure


def _peak_of(found: Mapping[str, Any]) -> float | None:
    return None if found["local_peak_bytes"] is None else found["local_peak_bytes"] / 1e6


def _ratio_of(found: Mapping[str, Any]) -> float:
    return float(found["median_ratio"])


def _grid(plt: Any, result: Result) -> Any:
    """Local peak and time by chunk and slots: measured in the field, predicted below it."""
    (row,) = rows_of(result, None, "grid")
    plain = row["contenders"][EAGER]["median_s"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), squeeze=False)
    for line, schedule in enumerate(("hierarchical", "double")):
        found = {name: each for name, each in row["contenders"].items() if name.startswith(f"{schedule}, ")}
        peaks = {n: (each["local_peak_bytes"] / 1e6, each["predicted_peak_bytes"] / 1e6) for n, each in found.items()}
        times = {n: (each["median_ratio"], each["predicted_s"] / plain) for n, each in found.items()}
        _field(axes[line][0], peaks, f"{schedule}, T={row['steps']:,}: local peak, MB")
        _field(axes[line][1], times, f"{schedule}: CPU time, plain BPTT = 1")
    return figure


def _field(axis: Any, values: Mapping[str, tuple[float, float]], title: str) -> None:
    chunks, slots = (list(dict.fromkeys(name.split(", ")[at] for name in values)) for at in (1, 2))
    nothing = float("nan")
    schedule = next(iter(values)).split(", ")[0]
    shown = [[values.get(f"{schedule}, {c}, {k}", (nothing, nothing)) for k in slots] for c in chunks]
    axis.imshow([[measured for measured, _ in line] for line in shown], cmap="YlOrRd", aspect="auto", alpha=0.7)
    for y, line in enumerate(shown):
        for x, (measured, predicted) in enumerate(line):
            if measured == measured:  # not NaN
                axis.text(x, y, f"{measured:.2f}\n({predicted:.2f})", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(slots)), slots)
    axis.set_yticks(range(len(chunks)), chunks)
    axis.set_xlabel("local checkpoints of a chunk")
    axis.set_ylabel("chunk, steps")
    axis.set_title(f"{title}; predicted in brackets", fontsize=9)


def _chunk(plt: Any, result: Result) -> Any:
    """Remote checkpoints: memory and time against the length of a chunk."""
    (row,) = rows_of(result, None, "chunk")
    plain = row["contenders"][EAGER]["median_s"]
    found = {int(name.partition("C=")[2]): each for name, each in row["contenders"].items() if name != EAGER}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for key, label, style in (
        ("local_peak_bytes", "local, measured", "o-"),
        ("predicted_peak_bytes", "local, predicted", "o:"),
        ("remote_peak_bytes", "on disk, predicted", "s:"),
    ):
        left.plot(list(found), [each[key] / 1e6 for each in found.values()], style, label=label)
    right.plot(list(found), [each["median_ratio"] for each in found.values()], "o-", label="measured")
    right.plot(list(found), [each["predicted_s"] / plain for each in found.values()], "o:", label="predicted")
    for axis, label in ((left, "peak, MB"), (right, "CPU time, plain BPTT = 1")):
        axis.set(xscale="log", xlabel="remote chunk, steps", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.set_xticks(list(found), [f"{chunk}" for chunk in found])
        axis.minorticks_off()
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    left.set_title(f"remote, T={row['steps']:,}, batch {row['batch']}", fontsize=9)
    return figure
