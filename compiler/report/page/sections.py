"""The part of a report's page that is about one recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reroll.planning.alternative import Alternative, pareto
from reroll.program.timeline import Timeline
from reroll.program.timeline_summary import coarser
from reroll.report.listing import InstructionRow, NodeRow, instruction_rows, node_rows, source_line
from reroll.report.page import charts
from reroll.report.page.markup import Markup, element, joined, script_data
from reroll.report.tables import FORMULA_COLUMNS, compared, facts
from reroll.words.units import nbytes_text, seconds_text

if TYPE_CHECKING:
    from reroll.report.by_formula import ByFormula
    from reroll.report.report import CarryLine, Loop

COLUMNS = 600  # of a chart, at most
ROWS = 1_000  # of a list, at most

PLANS = {
    "store_all": "Every tape is kept, so no step runs again.",
    "standard": "One carry is kept for each chunk of steps. To be reversed, a chunk runs again from it and is taped.",
    "remote": "One carry for each chunk of steps is kept off the device. To be reversed, a chunk runs again from it.",
    "hierarchical": "The carries of a chunk are kept off the device as one block. To be reversed, a chunk is read "
    "back, and runs again piece by piece.",
    "double": "One carry for each chunk of steps is kept. To be reversed, a chunk runs again twice: once to keep local "
    "carries, then piece by piece from these.",
}


def title(loop: Loop) -> str:
    """A recurrence in a few words."""
    where = source_line(loop.recurrence.where)
    return f"{loop.recurrence.name}, {loop.recurrence.steps:,} {loop.recurrence.unit}s" + (
        f", {where}" if where else ""
    )


def side_by_side(loops: Sequence[Loop], traces: Sequence[Timeline]) -> Markup:
    """The recurrences of a model in one table, each with a link to its section."""
    rows = []
    for number, (loop, trace) in enumerate(zip(loops, traces, strict=True)):
        unit = loop.recurrence.unit
        link = element("a", loop.recurrence.name, href=f"#loop-{number}")
        length = f"{loop.recurrence.steps:,} {unit}s"
        seconds = "" if trace.nominal else charts.amount_of_time(trace.seconds)
        peak = charts.amount(trace.peak("local"))
        rows.append([link, length, loop.choice.describe(), peak, f"{loop.tally.reforward_steps:,}", seconds])
    head = ["loop", "length", "schedule", "local peak", "run again", "time"]
    heading = element("h2", "The loops side by side", id="loops")
    return element("section", heading, table(head, rows, 3, "The loops side by side"), aria_labelledby="loops")


def loop_section(name: str, loop: Loop, trace: Timeline) -> Markup:
    """All about one recurrence; ``name`` is its id on the page."""
    parts = [
        element("h2", title(loop), id=name),
        _plan(loop),
        _timeline(name, loop, trace),
        _measured(loop, trace),
        _alternatives(loop.alternatives, loop.recurrence.unit),
        _formulas(loop.by_formula()),
        _carries(loop.carries),
        nodes(f"{name}-step", "The step", node_rows(loop.recurrence.step.graph)),
        _program(f"{name}-program", loop, trace),
    ]
    return element("section", *parts, aria_labelledby=name)


def _plan(loop: Loop) -> Markup:
    told = ("why", "measured peak", "measured time")  # elsewhere on the page
    rows = [joined(element("dt", name), element("dd", text)) for name, text in facts(loop) if name not in told]
    about = PLANS.get(loop.choice.schedule, "")
    said = [element("p", text, class_="why") for text in (about, loop.why) if text]
    return joined(element("h3", "The plan"), *said, element("dl", *rows, class_="facts"))


# Time.


def _timeline(name: str, loop: Loop, trace: Timeline) -> Markup:
    """Memory and schedule over the same time, with a slider that says what runs at a moment."""
    drawn = coarser(trace, COLUMNS)
    x = charts.time_scale(drawn)
    data = {
        "at": [round(100 * x.at(time), 3) for time in drawn.times],
        "text": [_moment(drawn, number) for number in range(len(drawn.times))],
        "first": drawn.names.index(trace.at_peak()),
    }
    slider = element(
        "input", type="range", min=0, max=len(drawn.times) - 1, id=f"{name}-time", aria_describedby=f"{name}-moment"
    )
    control = element(
        "div",
        element("label", "Moment", for_=f"{name}-time"),
        slider,
        element("output", id=f"{name}-moment", for_=f"{name}-time"),
        class_="moment",
        hidden=True,
    )
    parts = [
        _figure(f"Memory, {tier}", _peak(trace, tier), charts.memory(drawn, tier, loop.budget)) for tier in trace.memory
    ]
    unit = loop.recurrence.unit
    strokes = charts.legend(_strokes(drawn))
    parts.append(_figure("Schedule", _schedule_text(trace, unit), strokes, charts.schedule(drawn, unit)))
    if lanes := charts.transfers(drawn):
        parts.append(_figure("Transfers", _transfers_text(loop, trace), lanes))
    script = script_data(f"{name}-data", data)
    timeline = element("div", control, *parts, script, class_="timeline", data_name=name)
    return joined(element("h3", "Over time"), timeline, _closer(trace))


def _closer(trace: Timeline) -> Markup:
    """A part of the schedule, where the whole is too long to see single segments."""
    if trace.instructions <= COLUMNS:
        return Markup()
    return _figure("A closer look", joined("The first segments after the turn, one by one."), charts.closer(trace))


def _figure(name: str, text: Markup, *content: Markup) -> Markup:
    return element("figure", element("figcaption", element("b", name), " ", text), *content)


def _moment(trace: Timeline, number: int) -> str:
    bytes_ = [f"{tier} {nbytes_text(nbytes[number])}" for tier, nbytes in trace.memory.items()]
    return ", ".join([f"{trace.names[number]} at {time_text(trace, trace.times[number])}", *bytes_])


def time_text(trace: Timeline, seconds: float) -> str:
    """Seconds, or nominal units."""
    return f"{seconds:,.0f}" if trace.nominal else seconds_text(seconds)


def _peak(trace: Timeline, tier: str) -> Markup:
    where = f" at {trace.at_peak()}" if tier == "local" else ""
    return joined("at most ", charts.amount(trace.peak(tier)), where)


def _schedule_text(trace: Timeline, unit: str) -> Markup:
    length = time_text(trace, trace.seconds)
    often = "once" if trace.depth == 1 else f"{trace.depth} times"
    again = f"a {unit} runs again at most {often}" if trace.depth else f"no {unit} runs again"
    nominal = " No costs are known: the unit of time is a forward step, and a backward one takes two."
    shown = "Blocks over depth" if unit == "block" else "Steps of the sequence over time"
    text = f"{shown}. {trace.instructions:,} instructions in {length}; {again}."
    return joined(text + (nominal if trace.nominal else ""))


def _transfers_text(loop: Loop, trace: Timeline) -> Markup:
    tally = loop.tally
    free = " Without costs they take no time." if trace.nominal else ""
    return joined(f"{tally.remote_writes:,} writes, {tally.remote_reads:,} reads.{free}")


def _strokes(trace: Timeline) -> dict[str, str]:
    drawn = {event.kind for event in trace.events}
    found = {f"stroke {kind}": text for kind, text in charts.KINDS.items() if kind in drawn}
    kept = dict.fromkeys(stay.tier for stay in trace.stays)
    return found | {f"kept {charts.tier_class(tier)}": f"carry kept, {tier}" for tier in kept}


# Tables.


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0, label: str = "") -> Markup:
    """A table that scrolls sideways where it is too wide. The last ``numbers`` columns are numbers."""
    first = len(head) - numbers

    def cells(tag: str, texts: Sequence[str]) -> Markup:
        return element(
            "tr", *(element(tag, text, class_="n" if at >= first else None) for at, text in enumerate(texts))
        )

    body = element("tbody", *(cells("td", row) for row in rows))
    made = element("table", element("thead", cells("th", head)), body)
    return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=label)


def _measured(loop: Loop, trace: Timeline) -> Markup:
    rows = []
    if loop.measured_peak is not None:
        predicted = loop.prediction.peak
        note = compared(loop.measured_peak, predicted)
        rows.append(["local peak", charts.amount(predicted), charts.amount(loop.measured_peak), note])
    if loop.measured_seconds is not None:
        predicted_time = Markup() if trace.nominal else charts.amount_of_time(trace.seconds)
        note = "" if trace.nominal else compared(loop.measured_seconds, trace.seconds)
        rows.append(["time", predicted_time, charts.amount_of_time(loop.measured_seconds), note])
    if not rows:
        return Markup()
    head = ["", "predicted", "measured", "difference"]
    return joined(element("h3", "Predicted and measured"), table(head, rows, 3, "Predicted and measured"))


def _alternatives(alternatives: Sequence[Alternative], unit: str) -> Markup:
    if not alternatives:
        return Markup()
    best, tiers = pareto(alternatives), list(dict.fromkeys(tier for each in alternatives for tier in each.tiers))
    rows = []
    for each in sorted(alternatives, key=lambda each: (each.peak, each.seconds)):
        state = "chosen" if each.chosen else "" if each in best else "beaten"
        name = joined(element("b" if each.chosen else "span", each.name), " ", element("span", state, class_="state"))
        remote = [charts.amount(each.tiers.get(tier, 0)) for tier in tiers]
        rows.append([name, charts.amount(each.peak), *remote, seconds_text(each.seconds), f"{each.rerun:,}"])
    head = ["plan", "local peak", *(f"{tier} peak" for tier in tiers), "time", f"{unit}s run again"]
    text = joined(_curve_text(alternatives))
    entries = {"dot chosen": "chosen", "dot best": "on the curve"}
    if any(each not in best and not each.chosen for each in alternatives):
        entries["dot"] = "beaten"
    return joined(
        element("h3", "Alternatives"),
        _figure("Pareto curve", text, charts.legend(entries), charts.curve(alternatives)),
        table(head, rows, 3 + len(tiers), "Alternatives"),
    )


def _curve_text(alternatives: Sequence[Alternative]) -> str:
    """What the curve shows, and which of its axes are logarithmic."""
    x, y = charts.curve_scales(alternatives)
    logs = [name for name, axis in (("memory", y), ("time", x)) if axis.log]
    said = f" {' and '.join(logs).capitalize()} on a logarithmic axis." if logs else ""
    return f"Local peak against predicted time. The line joins the plans that no other beats.{said}"


def _formulas(found: ByFormula) -> Markup:
    rows = [[name, element("code", formula), *numbers] for name, formula, *numbers in found.rows()]
    shown = [table(FORMULA_COLUMNS, rows, 3, "Formulas")] if rows else []
    return joined(element("h3", "Formulas"), *shown, element("p", found.text()))


def _carries(lines: Sequence[CarryLine]) -> Markup:
    rows = [
        [
            element("code", line.name),
            " x ".join(map(str, line.shape)) or "scalar",
            line.dtype,
            line.codec,
            line.fact,
            charts.amount(line.nbytes),
            charts.amount(line.kept),
        ]
        for line in lines
    ]
    head = ["name", "shape", "dtype", "codec", "values", "bytes", "kept as"]
    return joined(element("h3", "What a carry is made of"), table(head, rows, 2, "Carries"))


# Lists that can be searched.


def nodes(name: str, heading: str, rows: Sequence[NodeRow]) -> Markup:
    """The nodes of a graph, the first of them if there are many."""
    texts = [
        [element("code", row.name), row.op, row.target, element("code", row.args), row.shape, row.line]
        for row in rows[:ROWS]
    ]
    head = ["name", "op", "target", "operands", "value", "line"]
    count = _count(len(rows), len(rows) - len(texts), "nodes")
    return _searchable(name, heading, count, table(head, texts, label=heading))


def _count(number: int, left: int, what: str) -> str:
    return f"{number:,} {what}" + (f", {left:,} of them not listed" if left else "")


def _program(name: str, loop: Loop, trace: Timeline) -> Markup:
    rows, left = instruction_rows(loop.program, trace, ROWS)
    texts = [_instruction(row, trace) for row in rows]
    if left:
        texts.insert(ROWS - ROWS // 2, [f"{left:,} instructions are left out here", "", "", "", ""])
    head = ["instruction", "kind", "reads", "begins", "local"]
    count = _count(trace.instructions, left, "instructions")
    return _searchable(name, "The training program", count, table(head, texts, 2, "The training program"))


def _instruction(row: InstructionRow, trace: Timeline) -> list[str]:
    name, operands = element("code", row.name), element("code", row.operands)
    return [name, row.kind, operands, time_text(trace, row.begins), nbytes_text(row.local)]


def _searchable(name: str, heading: str, count: str, content: Markup) -> Markup:
    search = element(
        "div",
        element("label", "Filter", for_=f"{name}-filter"),
        element("input", type="search", id=f"{name}-filter", autocomplete="off", spellcheck="false"),
        element("output", id=f"{name}-count", for_=f"{name}-filter"),
        class_="search",
        hidden=True,
    )
    summary = element("summary", element("h3", heading), " ", element("span", count))
    return element("details", summary, search, content, id=name, class_="list")
