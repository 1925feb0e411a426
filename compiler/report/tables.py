"""Rich tables of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from reroll.graph.lines import CHECKPOINTED
from reroll.planning.alternative import Alternative, pareto
from reroll.segment.facts import LOSSY
from reroll.words.units import nbytes_text, seconds_text

if TYPE_CHECKING:
    from reroll.recurrence import Capture, Recurrence
    from reroll.report.by_formula import ByFormula
    from reroll.report.report import Loop

_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 60
_KINDS = 6  # of values on a tape that are listed


def compared(measured: float, predicted: float) -> str:
    """How a measured figure lies to the predicted one."""
    percent = round(100 * (measured / predicted - 1)) if predicted else 0
    return "as predicted" if percent == 0 else f"{abs(percent)} % {'above' if percent > 0 else 'below'} the prediction"


def stage_lines(stages: Mapping[str, Capture]) -> Iterator[str]:
    """The loops as captured, and behind each pass on loops that changed them, a line each; none if none did."""
    for name, found in stages.items() if len(stages) > 1 else ():
        rows = sum(each.row_bytes for each in found.recurrences)
        sizes = "; ".join(each.size for each in found.recurrences)
        yield f"Loops {'as captured' if name == 'captured' else f'behind {name}'}: {sizes}; {nbytes_text(rows)} of rows"


def loop_tables(loop: Loop) -> Iterator[RenderableType]:
    """A panel with the plan of a recurrence, its carries, its formulas, and the plans that were weighed against it."""
    yield Panel(_plan(loop), title=Text(loop.recurrence.name), title_align="left", box=box.ROUNDED, expand=True)
    yield _carries(loop)
    yield _formulas(loop.by_formula())
    if loop.alternatives:
        yield _alternatives(loop.alternatives, loop.recurrence.unit)


def _plan(loop: Loop) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts(loop):
        table.add_row(name, Text(text))
    table.add_row("over time", _sparkline([nbytes for _, nbytes in loop.prediction.timeline]))
    return table


def facts(loop: Loop) -> Iterator[tuple[str, str]]:
    """What there is to say of a recurrence and its plan: (name, text)."""
    recurrence, tally, most = loop.recurrence, loop.tally, loop.prediction.most
    unit = recurrence.unit
    yield "where", recurrence.where
    yield "loop", recurrence.size
    yield from _left(recurrence)
    if any(recurrence.modules):
        yield "blocks", _ends([name or "?" for name in recurrence.modules])
    yield "schedule", f"{loop.choice.describe()}, {loop.lowering} segments"
    yield from _budget(loop)
    if loop.why:
        yield "why", loop.why
    yield from _tapes(loop)
    yield f"{unit}s re-run", f"{tally.reforward_steps:,} ({loop.reforward:.2f} for each {unit} of the forward)"
    if tally.remote_writes:
        writes = f"{tally.remote_writes:,} writes ({tally.carries_written:,} carries)"
        yield "transfers", f"{writes}, {tally.remote_reads:,} reads ({tally.carries_read:,} carries)"
    if loop.cuts:
        yield "truncated", loop.cuts.describe()
    for codec in LOSSY:
        if any(codec in node.kwargs.get("codec", ()) for node in loop.program.graph.nodes):
            yield "rounded", f"kept carries, to {codec}, so gradients are approximate: {_error(loop)}"
    if loop.kept[0]:
        carries, plain, kept = loop.kept
        yield "kept so far", f"{carries:,} carries, {nbytes_text(plain)}, compressed to {nbytes_text(kept)}"
    yield from [("event product", line.describe()) for line in loop.events]
    yield from [("rewrite", each.describe()) for each in loop.rewrites]
    if loop.outputs:
        yield "outputs", f"{nbytes_text(loop.outputs)} in all {unit}s"
    yield "gradients", f"{nbytes_text(loop.gradients)} added up for parameters and inputs (not counted below)"
    yield (
        "local peak",
        (
            f"{nbytes_text(most.nbytes)} at {most.node}: {nbytes_text(most.held)} carries and tapes, "
            f"{nbytes_text(most.scratch)} for the running segment"
        ),
    )
    yield from measured(loop)


def _budget(loop: Loop) -> Iterator[tuple[str, str]]:
    if loop.budget:
        used = loop.prediction.most.nbytes / loop.budget
        yield "budget", f"{nbytes_text(loop.budget)} for this loop, of which {used:.2f} is predicted to be held"


def _left(recurrence: Recurrence) -> Iterator[tuple[str, str]]:
    """What became of the iterations of the user's loop that are not among the steps."""
    if not recurrence.left:
        return
    whole = recurrence.steps + recurrence.left
    reason = (
        "a step begins in the middle of an iteration, where the fewest bytes cross"
        if recurrence.within
        else "they do other operations than the others"
    )
    yield "by themselves", f"{recurrence.left} of {whole:,} iterations, before and behind: {reason}"


def _tapes(loop: Loop) -> Iterator[tuple[str, str]]:
    unit = loop.recurrence.unit
    yield "tape", f"{nbytes_text(loop.tape_step)} a {unit}, {nbytes_text(loop.saved)} a segment"
    if loop.taped:
        yield "kept in a tape", _counted([value.name or value.op for value in loop.taped])
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    if any(node.target is checkpoint or node.meta.get(CHECKPOINTED) for node in loop.recurrence.step.graph.nodes):
        yield "checkpoints", f"torch.utils.checkpoint in a {unit} has no say: the schedule chooses what runs again"


def measured(loop: Loop) -> Iterator[tuple[str, str]]:
    """The measured peak and time of a recurrence beside the predicted ones, as far as they are known."""
    if loop.measured_peak is not None:
        text = compared(loop.measured_peak, loop.prediction.peak)
        yield "measured peak", f"{nbytes_text(loop.measured_peak)}, {text}"
    if loop.measured_seconds is not None:
        text = f", {compared(loop.measured_seconds, loop.trace().seconds)}" if loop.costs else ""
        yield "measured time", seconds_text(loop.measured_seconds) + text


def _error(loop: Loop) -> str:
    error = loop.gradient_error
    return "reroll.gradient_error says by how much" if error is None else f"off by {error:.2g} of their norm, measured"


def _ends(names: Sequence[str]) -> str:
    """The first names and the last: "blocks.0, blocks.1, ..., blocks.11"."""
    return ", ".join(names if len(names) <= _KINDS else [*names[:2], "...", names[-1]])


def _counted(names: Sequence[str]) -> str:
    """How often each name occurs, the most frequent first: "8 hidden, 1 carry"."""
    counts = Counter(names).most_common()
    shown = ", ".join(f"{count} {name}" for name, count in counts[:_KINDS])
    return shown + (f" and {len(counts) - _KINDS} other kinds" if len(counts) > _KINDS else "")


def _sparkline(values: list[int]) -> str:
    """Memory over the instructions of the program, the highest of each column."""
    columns = min(_COLUMNS, len(values))
    edges = [round(index * len(values) / columns) for index in range(columns + 1)]
    most = max(*values, 1)
    tops = [max(values[start:stop]) for start, stop in pairwise(edges)]
    return "".join(_BARS[-(-top * (len(_BARS) - 1) // most)] for top in tops)


def _carries(loop: Loop) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="carries", title_justify="left", title_style="dim", expand=True)
    table.add_column("name", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for name in ("bytes", "kept as"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    table.add_column("values")
    for each in loop.carries:
        shape = " x ".join(map(str, each.shape)) or "scalar"
        kept = nbytes_text(each.kept)
        table.add_row(each.name, shape, each.dtype, nbytes_text(each.nbytes), kept, each.codec, Text(each.fact))
    return table


FORMULA_COLUMNS = ("", "formula, without rounding", "gives", "exactly", "here")


def _formulas(found: ByFormula) -> RenderableType:
    """The figures of a plan by their formulas, each with its number, the exact one, and what was counted here."""
    if not found.lines:
        return Text.assemble(("formulas\n\n", "dim"), f"{found.text()}\n")
    table = Table(box=box.SIMPLE_HEAD, title="formulas", title_justify="left", title_style="dim", expand=True)
    table.caption, table.caption_justify, table.caption_style = Text(f"{found.text()}\n"), "left", ""
    for name in FORMULA_COLUMNS[:2]:
        table.add_column(name, overflow="fold")
    for name in FORMULA_COLUMNS[2:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows():
        table.add_row(*map(Text, row))
    return table


def _alternatives(alternatives: Sequence[Alternative], unit: str) -> Table:
    tiers = list(dict.fromkeys(tier for each in alternatives for tier in each.tiers))
    table = Table(
        box=box.SIMPLE_HEAD,
        title="alternatives (memory: for carries and tapes)",
        title_justify="left",
        title_style="dim",
        expand=True,
    )
    table.add_column("plan", overflow="fold")
    for name in ("local peak", *tiers, "time", f"{unit}s re-run"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    best = pareto(alternatives)
    for each in sorted(alternatives, key=lambda each: (each.peak, each.seconds)):
        remote = [nbytes_text(each.tiers.get(tier, 0)) for tier in tiers]
        notes = ("chosen" if each.chosen else "", "" if each in best else "beaten")
        cells = [nbytes_text(each.peak), *remote, seconds_text(each.seconds), f"{each.rerun:,}"]
        table.add_row(Text(each.name), *cells, ", ".join(filter(None, notes)))
    return table


def summary(peak: int, outside: Mapping[str, int], remote: Mapping[str, int], measured: int | None = None) -> Table:
    """What a training step takes in each tier, and the local peak that was measured."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title="predicted peak of a training step, without what is outside of the model, such as a loss",
        title_justify="left",
        title_style="dim",
    )
    table.add_column("tier")
    table.add_column("bytes", justify="right")
    table.add_column("of which")
    parts = ", ".join(f"{nbytes_text(nbytes)} {name}" for name, nbytes in outside.items() if nbytes)
    table.add_row("local", f"{peak:,} ({nbytes_text(peak)})", parts)
    for tier, nbytes in remote.items():
        table.add_row(tier, f"{nbytes:,} ({nbytes_text(nbytes)})", "")
    if measured is not None:
        table.add_row("measured", f"{measured:,} ({nbytes_text(measured)})", compared(measured, peak))
    return table
