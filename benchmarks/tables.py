"""The printed tables and the plot of a result of ``figures.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20


def show(result: dict[str, Any]) -> None:
    """Print a result."""
    console, where = Console(width=150), result["environment"]
    load = "/".join(f"{where[f'load_average_{when}'][0]:.1f}" for when in ("before", "after"))
    console.print(
        f"{where['machine']} ({where['cpu']}, {where['cores']} cores, load {load}), torch {where['torch']}, "
        f"Python {where['python']}, {where['date']}, commit {where['commit']}"
    )
    for part, table in (("memory", _steps), ("time", _steps), ("long", _long), ("compile", _compile)):
        if part in result and not (part == "time" and "memory" in result):
            console.print(table(result))
    console.print(_goals(result))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _steps(result: dict[str, Any]) -> Table:
    """Memory and time per training step."""
    network, memory, seconds = result["environment"]["network"], result.get("memory", {}), result.get("time", {})
    title = f"D2r, T={network['steps']}, batch {network['batch']}: one training step"
    table = _table(title, "", "peak MiB", "predicted", "CPU ms", "x plain", "(medians)", "error", "plan")
    for name in memory or seconds:
        held, spent, plan = memory.get(name), seconds.get(name), result["plans"].get(name)
        times = (spent["least_s"] * 1e3, spent["least_ratio"], spent["median_ratio"]) if spent else ()
        table.add_row(
            name,
            _mib(held["local_peak_bytes"]) if held else "",
            _mib(plan["predicted_peak_bytes"]) if plan else "",
            *(f"{value:.{digits}f}" for value, digits in zip(times or [0] * 3, (0, 2, 2), strict=True)),
            f"{held['relative_error']:.0e}" if held else "",
            plan["plan"].partition(" ")[2].strip("()") if plan else "",
        )
    return table


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.2f}"


def _long(result: dict[str, Any]) -> Table:
    """Double with disk on a long sequence."""
    found = result["long"]
    table = _table(f"Double with disk, spilling to {found['spill_folder']} ({found['filesystem']})", "", "value")
    table.add_row(f"local peak of plain BPTT, T={found['plain_steps']}, MiB", _mib(found["plain_local_peak_bytes"]))
    table.add_row(f"local peak of double, T={found['steps']}, MiB", _mib(found["local_peak_bytes"]))
    table.add_row("ratio", f"1/{1 / found['ratio']:.0f}")
    table.add_row("plan", found["plan"])
    table.add_row("chunks, local slots", f"{found['chunks']}, {found['slots']}")
    table.add_row("gradient error", f"{found['relative_error']:.1e}")
    return table


def _compile(result: dict[str, Any]) -> Table:
    """The backend after Dynamo."""
    short, long = result["compile"]["short"], result["compile"]["long"]
    table = _table(
        "The backend after Dynamo, wall seconds, fresh process and cache",
        "",
        *(f"T={r['steps']}" for r in (short, long)),
    )
    table.add_row("rolled steps; segments", *(f"{r['rolled_steps']}; {r['segments']}" for r in (short, long)))
    table.add_row("nodes from Dynamo", *(str(r["dynamo_nodes"]) for r in (short, long)))
    for part in dict.fromkeys([*short["parts_s"], *long["parts_s"]]):
        table.add_row(f"  {part}", *(f"{r['parts_s'].get(part, 0.0):.2f}" for r in (short, long)))
    table.add_row("backend", *(f"{r['backend_s']:.2f}" for r in (short, long)))
    runs = [sorted(result["compile"]["backend_s_of_all_runs"][name]) for name in ("short", "long")]
    table.add_row("backend, all runs", *(", ".join(f"{seconds:.1f}" for seconds in each) for each in runs))
    table.add_row("(Dynamo and the first forward)", *(f"{r['dynamo_and_first_forward_s']:.1f}" for r in (short, long)))
    return table


def _goals(result: dict[str, Any]) -> Table:
    """What had to be shown."""
    table = _table("Goals", "", "found", "at most", "")
    for what, value, most, met in result["goals"]:
        table.add_row(what, f"{value:.3g}", f"{most:.3g}", "met" if met else "MISSED")
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Local peak against time per step, both on plain BPTT's scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, spent in result["time"].items():
        mib = result["memory"][name]["local_peak_bytes"] / MIB
        colour = {"inductor": "tab:blue", "eager": "tab:orange"}.get(name.rsplit(", ", 1)[-1], "black")
        axes.scatter(spent["least_ratio"], mib, color=colour)
        axes.annotate(name, (spent["least_ratio"], mib), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="CPU time per training step, x plain BPTT", ylabel="local peak, MiB", yscale="log")
    axes.set_title(f"D2r, T={result['environment']['network']['steps']}, one thread")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
