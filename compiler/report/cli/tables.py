"""Rich tables and sentences of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from reroll.planning.offers import Priced, Row, least
from reroll.schedules.machine import Machine
from reroll.words.units import nbytes_text, seconds_text

_TRANSFERS = {
    False: "Transfers block. The pass prefetch, one of the default passes, holds one block more: see --overlap.",
    True: "Transfers run beside the segments, and blocks are read one chunk ahead. hrevolve may take longer.",
}


def plan_table(problem: Priced, rows: Sequence[Row], best: Row | None) -> Table:
    """All schedules: whether they fit, chunk and slots, peaks, and what they cost."""
    carry, tape = nbytes_text(problem.carry), nbytes_text(problem.tape // problem.segment)
    table = _table(f"{problem.steps:,} steps, carries of {carry}, tapes of {tape} a step")
    for name in ("fits", "schedule", "tier"):
        table.add_column(name, no_wrap=True)
    for name in ("C", "K", "local", "remote", "time", "re-run", "transfers"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        fits = "best" if row is best else "yes" if row.fits else "no"
        sizes = (nbytes_text(row.local_peak), nbytes_text(row.remote_peak) if row.remote_peak else "")
        counts = ("" if not number else f"{number:,}" for number in (row.chunk, row.slots))
        moves = (f"{number:,}" if number else "" for number in (row.rerun, row.writes + row.reads))
        style = "bold" if row is best else "" if row.fits else "dim"
        table.add_row(fits, row.schedule, row.tier, *counts, *sizes, seconds_text(row.seconds), *moves, style=style)
    return table


def plan_text(problem: Priced, rows: Sequence[Row], best: Row | None) -> Text:
    """What to use, and what the table does not say."""
    lines: list[str] = []
    if best is not None and problem.memory is None:
        small = least(problem, rows)
        lines.append(
            f"Without a budget {_named(best)} is the fastest, with {seconds_text(best.seconds)} and "
            f"{nbytes_text(best.local_peak)}; {_named(small)} holds the least, {nbytes_text(small.local_peak)}. "
            "The table shows the least local peak of each schedule, of revolve and hrevolve the least time in the "
            "memory of standard; --budget asks for the fastest that fits."
        )
    elif best is not None:
        given = ", ".join(f"{name}={value!r}" for name, value in best.options(problem.segment).items())
        lines.append(
            f"Use {_named(best)}: {seconds_text(best.seconds)} a training step, {nbytes_text(best.local_peak)} "
            f"({best.local_peak:,} bytes) local. reroll.compile(model, {given})"
        )
    if any(not row.fits for row in rows):
        lines.append("Of schedules that do not fit the table shows the least local peak.")
    if problem.remote is None:
        lines.append(
            "Schedules that keep carries elsewhere are not shown; name a tier: --remote 2GB/s, or --remote disk."
        )
    lines.append(
        "Local peaks count kept carries and tapes; the running carry and its gradient, "
        f"{nbytes_text(2 * problem.carry)}, come on top."
    )
    if problem.remote is not None:
        lines.append(_TRANSFERS[problem.costs.overlapped])
    return Text("\n".join(lines))


def refusal(problem: Priced, rows: Sequence[Row]) -> str:
    """Why nothing fits, and the least that would."""
    found = least(problem, rows)
    further = "" if problem.remote else ", or name a tier for carries, such as --remote 2GB/s"
    further += ", or compile shorter segments" if problem.segment > 1 else ""
    budget = "" if problem.memory is None else f" {nbytes_text(problem.memory)} ({problem.memory:,} bytes)"
    return (
        f"No schedule fits the budget{budget}. The least that would is {found.local_peak:,} bytes "
        f"({nbytes_text(found.local_peak)}), by {_named(found)}. Raise --budget{further}."
    )


def _named(row: Row) -> str:
    numbers = (("C", row.chunk), ("K", row.slots))
    named = ", ".join(f"{letter}={number:,}" for letter, number in numbers if number is not None)
    where = f" ({row.tier})" if row.tier != "local" or row.schedule == "double" else ""
    return f"{row.schedule}{where}{' with ' * bool(named)}{named}"


def machine_table(machine: Machine) -> Table:
    """The tiers of a machine."""
    table = _table(f"{machine.name} ({machine.origin})")
    table.add_column("tier", no_wrap=True)
    for name in ("write", "read", "latency", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    for tier in machine.tiers.values():
        rates = (f"{rate / 1e9:.3g} GB/s" for rate in (tier.write, tier.read))
        free = "unknown" if tier.capacity is None else nbytes_text(tier.capacity)
        table.add_row(tier.name, *rates, seconds_text(tier.latency), free)
    return table


def passes_table(passes: Sequence[Mapping[str, Any]]) -> Table:
    """Passes in the default order, then the others."""
    table = _table("passes, in the default order; the others run where the option `passes` names them")
    table.add_column("", justify="right", no_wrap=True)
    for name in ("pass", "on"):
        table.add_column(name, no_wrap=True)
    table.add_column("what it does")
    for each in passes:
        table.add_row(str(each["default"] or ""), each["name"], each["on"], Text(each["what"]))
    return table


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="dim", padding=(0, 1, 0, 0), show_edge=False
    )
