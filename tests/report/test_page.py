"""The page of a report, read by a parser: well formed, self-contained, accessible, escaped, right in its figures."""

import html
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from reports import COSTS, NASTY, full, loop, report
from reroll.report.page.charts import Scale, bytes_log_scale, bytes_scale, seconds_scale, steps_scale
from reroll.report.page.markup import element, joined, script_data
from reroll.report.page.page import page as page_of
from reroll.report.report import Report

VOID = {"meta", "input", "base", "img", "link"}
REFERENCES = ("for", "aria-labelledby", "aria-describedby")
REPORTS: dict[str, Callable[[], Report]] = {
    "full": full,
    "nominal": lambda: report(loop("standard")),
    "two": lambda: report(loop("standard"), loop("hierarchical", costs=COSTS)),
    "long": lambda: report(loop("double", steps=3_000, chunk=50, slots=8, costs=COSTS)),
    "none": lambda: Report((), full().outer, reason=f"nothing repeats in {NASTY}"),
}


class Page(HTMLParser):
    """What a page holds; tags that are not balanced are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.labelled: set[int] = set()
        self.texts: list[str] = []
        self.raw: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute is given twice: {attrs}"
        if "label" in self.open:
            self.labelled.add(len(self.elements))
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.raw if self.open and self.open[-1] in ("style", "script") else self.texts).append(data)

    def all(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module", params=list(REPORTS))
def shown(request: pytest.FixtureRequest) -> tuple[Report, Page]:
    made = REPORTS[request.param]()
    return made, Page(page_of(made))


def test_the_page_loads_nothing(shown: tuple[Report, Page]) -> None:
    _, page = shown
    tags = Counter(tag for tag, _ in page.elements)
    assert not tags.keys() & {"link", "img", "iframe", "object", "embed", "base", "video", "audio", "image", "use"}
    assert not page.all("src")
    assert all(link.startswith("#") for link in page.all("href"))
    for text in (*page.raw, *page.all("style")):
        assert not re.search(r"https?:|//\w|url\(|@import|import\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in page.all("content")[-1]


def test_names_and_labels_belong_together(shown: tuple[Report, Page]) -> None:
    _, page = shown
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    assert {name for each in REFERENCES for name in page.all(each)} <= set(ids)
    assert {link.removeprefix("#") for link in page.all("href")} <= set(ids)
    for number, (tag, attributes) in enumerate(page.elements):
        if tag == "input":
            assert number in page.labelled or attributes["id"] in page.all("for")
        if tag == "svg":
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"]) > 10
        if attributes.get("role") == "region":
            assert attributes["aria-label"]
            assert attributes["tabindex"] == "0"
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1


def test_the_figures_are_those_of_the_report(shown: tuple[Report, Page]) -> None:
    made, page = shown
    values = page.all("value")
    if not made.loops:
        assert made.reason[1:] in page.text
        return
    exact = [made.predicted_peak, *made.remote_peaks.values(), made.measured_peak, made.outside]
    exact += [found for each in made.loops for found in (each.prediction.peak, each.prediction.most.held)][:2]
    exact += [line.kept for each in made.loops for line in each.carries]
    exact += [each.peak for one in made.loops for each in one.alternatives]
    assert {str(number) for number in exact if number} <= set(values)
    headed = len(made.loops), len(made.loops) > 1, bool(made.proved), bool(made.notes)
    assert len([tag for tag, _ in page.elements if tag == "h2"]) == 1 + sum(headed)
    for each in made.loops:
        assert f"{each.recurrence.steps:,} steps" in page.text
        assert each.choice.describe() in page.text
        label = f"Memory held in tier local over time: at most {each.prediction.peak:,} bytes."
        assert label in page.all("aria-label")
    nominal = any(each.costs is None for each in made.loops)
    assert ("No costs are known" in page.text) == nominal


def test_names_are_escaped() -> None:
    page = Page(page_of(full()))
    assert page.text.count(NASTY) >= 6  # title, heading, carry, reason, note, alternative
    known = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "script",
        "a",
        "header",
        "main",
        "footer",
        "section",
        "nav",
    }
    known |= {"div", "p", "span", "b", "i", "code", "ul", "li", "dl", "dt", "dd", "data", "h1", "h2", "h3", "fieldset"}
    known |= {
        "legend",
        "label",
        "button",
        "input",
        "output",
        "figure",
        "figcaption",
        "svg",
        "path",
        "details",
        "summary",
    }
    assert {tag for tag, _ in page.elements} <= known | {"table", "thead", "tbody", "tr", "th", "td"}
    assert sum(tag == "script" for tag, _ in page.elements) == 2


def test_long_programs_are_cut_and_say_so() -> None:
    made = report(loop("double", steps=3_000, chunk=50, slots=8))
    text = page_of(made)
    page = Page(text)
    left = made.loops[0].trace().instructions - 1_000
    assert f"{left:,} instructions are left out here" in page.text
    assert sum(tag == "tr" for tag, _ in page.elements) < 1_100
    assert "A closer look" in page.text
    assert len(text) < 600_000


def test_a_large_graph_is_cut_too() -> None:
    graph = fx.Graph()
    for _ in range(1_200):
        graph.placeholder("x")
    page = Page(page_of(Report((), graph, reason="nothing repeats")))
    assert "1,200 nodes, 200 of them not listed" in page.text
    assert sum(tag == "tr" for tag, _ in page.elements) == 1_001


def test_what_is_not_known_is_not_shown() -> None:
    text = Page(page_of(report())).text
    assert "Pareto" not in text
    assert "measured" not in text
    text = Page(page_of(full())).text
    for heading in ("Pareto curve", "Predicted and measured", "chosen", "beaten", "A training step is predicted"):
        assert heading in text


def test_a_notebook_gets_a_frame(tmp_path: Path) -> None:
    made = full()
    made.save_html(tmp_path / "plan.html")
    (frame,) = Page(made._repr_html_()).elements
    assert frame[0] == "iframe"
    assert frame[1]["sandbox"] == "allow-scripts allow-downloads"
    base = '<base href="about:srcdoc">'  # else links within the page would lead out of the frame
    assert base in frame[1]["srcdoc"]
    assert frame[1]["srcdoc"].replace(base, "") == (tmp_path / "plan.html").read_text("utf-8")


def test_only_markup_is_not_escaped() -> None:
    inner = element("b", NASTY, class_="x", data_y=NASTY, hidden=True, title=None)
    assert inner == f'<b class="x" data-y="{html.escape(NASTY)}" hidden>{html.escape(NASTY)}</b>'
    assert element("p", inner, "<") == f"<p>{inner}&lt;</p>"
    assert joined("&", element("input", value="'")) == '&amp;<input value="&#x27;">'
    assert "</script" not in script_data("d", ["</script>"]).removesuffix("</script>")


@given(st.integers(1, 10**12), st.integers(1, 10**6), st.floats(1e-7, 1e5), st.booleans())
def test_ticks_are_few_distinct_and_on_the_axis(nbytes: int, steps: int, seconds: float, nominal: bool) -> None:
    low = bytes_log_scale([nbytes, 40 * nbytes])
    scales = [bytes_scale(nbytes), steps_scale(0, steps), seconds_scale(0, seconds, nominal), low]
    assert low.at(low.high) == pytest.approx(1)
    for scale in scales:
        texts = [text for _, text in scale.ticks]
        assert len(texts) == len(set(texts)) <= 8
        assert all(-1e-9 <= scale.at(value) <= 1 + 1e-9 for value, _ in scale.ticks)


def test_an_axis_without_length_has_a_place() -> None:
    assert Scale(0, 0).at(0) == 0
