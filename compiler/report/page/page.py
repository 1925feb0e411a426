"""A report as one HTML page that needs nothing else: no network, no library, and no script for its main content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from reroll.program.timeline import Timeline
from reroll.report.headline import Headline, figures
from reroll.report.listing import node_rows
from reroll.report.page import charts
from reroll.report.page.markup import Markup, element, joined
from reroll.report.page.sections import loop_section, nodes, side_by_side, title
from reroll.report.tables import compared

if TYPE_CHECKING:
    from reroll.report.report import Report


def page(report: Report, base: str = "") -> str:
    """The whole page. ``base``: the address that links within the page are relative to, if it is not its own."""
    traces = [loop.trace() for loop in report.loops]
    found = figures(report, traces)
    body = [
        element("a", "Skip to the plan", class_="skip", href="#plan"),
        element("header", *_header(report, found)),
        element("main", *_main(report, traces, found), id="plan"),
        element("footer", element("p", "Written by reroll. This page is one file and loads nothing.")),
    ]
    template = Template(_resource("page.html"))
    heading = f"{found.headline()} - reroll" if report.loops else "reroll: no recurrence"
    return template.substitute(
        base=element("base", href=base) if base else "",
        title=joined(heading),
        style=_resource("page.css"),
        script=_resource("page.js") + _resource("picture.js"),
        body="\n".join(body),
    )


def framed(report: Report, height: int = 760) -> str:
    """The page in a frame of its own, of ``height`` pixels, for notebooks: no style leaves it, and none comes in."""
    style = f"width:100%;height:{height}px;border:0;border-radius:8px;resize:vertical;overflow:auto"
    # Links in a frame's text are relative to the page around it, unless its base is the text itself.
    text = page(report, base="about:srcdoc")
    return element(
        "iframe", srcdoc=text, style=style, sandbox="allow-scripts allow-downloads", title="reroll: the plan"
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _header(report: Report, found: Headline) -> Iterator[Markup]:
    themes = [
        element("label", element("input", type="radio", name="theme", id=f"theme-{name}", checked=name == "auto"), name)
        for name in ("auto", "light", "dark")
    ]
    legend = element("legend", "Theme")
    save = element("button", "Save as PNG", type="button", id="picture", hidden=True)
    yield element(
        "div", element("p", "reroll", class_="mark"), save, element("fieldset", legend, *themes), class_="top"
    )
    if not report.loops:
        yield element("h1", "No recurrence was found")
        yield element("p", f"{report.reason[:1].upper()}{report.reason[1:]}.", class_="verdict")
        return
    yield element("h1", found.headline())
    yield element("p", found.verdict(), class_="verdict")
    items = [element("li", element("a", title(loop), href=f"#loop-{n}")) for n, loop in enumerate(report.loops)]
    yield element("nav", element("ul", *items), aria_label="Recurrences")


def _main(report: Report, traces: Sequence[Timeline], found: Headline) -> Iterator[Markup]:
    if report.loops:
        yield _key_figures(report, found)
        yield _breakdown(report, found)
    if len(report.loops) > 1:
        yield side_by_side(report.loops, traces)
    for number, (loop, trace) in enumerate(zip(report.loops, traces, strict=True)):
        yield loop_section(f"loop-{number}", loop, trace)
    if report.proved:
        text = element("p", f"{report.proved[:1].upper()}{report.proved[1:]}.")
        yield element("section", element("h2", "Proved", id="proved"), text, aria_labelledby="proved")
    if report.notes:
        notes = [element("li", text) for text in report.notes]
        yield element("section", element("h2", "Notes", id="notes"), element("ul", *notes), aria_labelledby="notes")
    if not report.loops:
        yield nodes("graph", "The graph as it was captured", node_rows(report.outer))


def _key_figures(report: Report, found: Headline) -> Markup:
    given = [
        ("local peak", charts.amount(report.predicted_peak)),
        ("with all tapes kept", charts.amount(found.plain_peak)),
    ]
    given += [(f"{tier} peak", charts.amount(nbytes)) for tier, nbytes in report.remote_peaks.items()]
    unit = "block" if all(loop.recurrence.unit == "block" for loop in report.loops) else "step"
    given.append((f"{unit}s run again, per {unit}", element("data", f"{found.rerun:.2f}", value=found.rerun)))
    if found.seconds is not None:
        given.append(("predicted time", charts.amount_of_time(found.seconds)))
    if report.measured_peak is not None:
        note = compared(report.measured_peak, report.predicted_peak)
        given.append((f"measured peak, {note}", charts.amount(report.measured_peak)))
    if report.measured_seconds is not None:
        given.append(("measured time", charts.amount_of_time(report.measured_seconds)))
    items = [element("div", element("dt", name), element("dd", value)) for name, value in given]
    return element("dl", *items, class_="figures", style=f"--count:{len(given)}")


def _breakdown(report: Report, found: Headline) -> Markup:
    gradients = sum(loop.gradients for loop in report.loops)
    return element(
        "section",
        element("h2", "What is held at the peak", id="breakdown"),
        charts.bar(found.parts),
        element(
            "p",
            charts.amount(gradients),
            " of gradients are added up for parameters and inputs. None of these are counted.",
            class_="aside",
        ),
        aria_labelledby="breakdown",
    )
