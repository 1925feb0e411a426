"""The page in headless Chromium: no error, charts are there, nothing overlaps, filters and sliders work, and a button
makes a picture.

A window of Chromium is at least 500 pixels wide, so a page is read in a frame, which can be as narrow as a phone.
"""

import html
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reports import COSTS, full, loop, report
from reroll.planning.alternative import Alternative
from reroll.report.report import Loop, Report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += (
    " --disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --virtual-time-budget=3000"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

# Shows the page in a frame, and leaves what its reader saw as the title, which --dump-dom prints.
FRAME = """<!doctype html><title></title>
<script>addEventListener("message", (event) => { document.title = event.data; });</script>
<iframe src="read.html" style="width: WIDTHpx; height: 2400px; border: 0"></iframe>"""

# Plays a reader.
READER = """<script>
const box = (node) => node.getBoundingClientRect();
const shown = (selector, root) => [...(root || document).querySelectorAll(selector)].filter((n) => box(n).width > 0);
const apart = (nodes) => nodes.every((a, i) => nodes.slice(i + 1).every((b) => {
  const [p, q] = [box(a), box(b)];
  return p.right <= q.left || q.right <= p.left || p.bottom <= q.top || q.bottom <= p.top;
}));
const meet = (p, q) => p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom;
const drawn = (path) => {  // the box of a path with its stroke
  const [{ left, right, top, bottom }, half] = [box(path), parseFloat(getComputedStyle(path).strokeWidth) / 2];
  return { left: left - half, right: right + half, top: top - half, bottom: bottom + half };
};
const type = (input, text, event) => { input.value = text; input.dispatchEvent(new Event("input")); };
const seen = { width: window.innerWidth };
let canvas = null;
const encode = HTMLCanvasElement.prototype.toDataURL;
HTMLCanvasElement.prototype.toDataURL = function (...given) { canvas = this; return encode.apply(this, given); };
HTMLAnchorElement.prototype.click = function () {
  seen.saved = [this.download, this.href.slice(0, 22), this.href.length];
};
const button = document.getElementById("picture");
button.click();
const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
const scale = canvas.width / window.innerWidth;
const colours = (node) => {  // how many colours the picture has where an element stands
  const { left, top, width, height } = box(node);
  const [from, to] = [left, left + width].map((x) => Math.round(x * scale));
  const found = new Set();
  for (let y = Math.round(top * scale); y < (top + height) * scale; y += 1) {
    pixels.subarray(y * canvas.width + from, y * canvas.width + to).forEach((colour) => found.add(colour));
  }
  return found.size;
};
seen.picture = { button: box(button).width > 0, size: [canvas.width, canvas.height] };
seen.picture.page = [window.innerWidth, box(document.documentElement).height];
if (window.innerWidth > 1000) {
  seen.picture.drawn = shown("svg, h1, h2, h3, figcaption, dd, td:not(:empty), .bar, .legend li")
    .filter((node) => node.checkVisibility()).map(colours);
  seen.picture.empty = colours(document.querySelector(".moment"));
}
document.querySelectorAll("details").forEach((details) => { details.open = true; });
seen.wide = document.documentElement.scrollWidth - window.innerWidth;
seen.tiles = shown(".figures > div").map((tile) => [box(tile).top, tile.scrollWidth - tile.clientWidth]);
seen.overlaid = shown(".tag").map((tag) => ({
  points: [...document.querySelectorAll("path.dot")].filter((dot) => meet(box(tag), drawn(dot))).length,
  legends: shown(".legend li, figcaption").filter((other) => meet(box(tag), box(other))).length,
}));
seen.points = document.querySelectorAll("path.dot:not(.hole)").length;
seen.notes = shown(".panel").map((panel) => apart(shown(".note, .level, .tag", panel)));
seen.tables = shown(".scroll").map((table) => {
  table.scrollLeft = 1e6;
  const last = [...table.querySelectorAll("tr")].map((row) => row.lastElementChild).filter((cell) => box(cell).width);
  return {
    inside: box(table).right <= window.innerWidth,
    hidden: table.scrollWidth - table.clientWidth,
    reached: last.every((cell) => box(cell).right <= box(table).right + 1),
    tall: table.closest(".list") ? 0 : table.scrollHeight - table.clientHeight,
  };
});
seen.text = document.querySelector("main").textContent;
seen.links = [...document.querySelectorAll("#loops ~ * a")].map((link) => link.getAttribute("href"));
seen.charts = shown("svg").map((svg) => [box(svg).width, box(svg).height]);
seen.labels = shown(".panel").map((panel) => apart(shown(".ys span", panel)) && apart(shown(".xs span", panel)));
seen.edges = shown(".panel span").filter((n) => box(n).left < 0 || box(n).right > window.innerWidth + 1).length;
seen.colours = ["light", "dark"].map((theme) => {
  document.getElementById(`theme-${theme}`).checked = true;
  return getComputedStyle(document.body).backgroundColor;
});
const list = document.getElementById("loop-0-program");
const rows = () => shown("tbody tr", list).length;
seen.rows = [rows()];
type(list.querySelector("input"), "OFFLOAD disk");
seen.rows.push(rows());
seen.count = list.querySelector("output").textContent;
type(list.querySelector("input"), "no such thing");
seen.rows.push(rows());
type(list.querySelector("input"), "");
seen.rows.push(rows());
const moment = document.querySelector(".moment");
seen.moments = [moment.querySelector("output").textContent];
type(moment.querySelector("input"), "0");
seen.moments.push(moment.querySelector("output").textContent);
const area = document.querySelector(".timeline .area");
const at = { clientX: box(area).left + box(area).width / 2, bubbles: true };
area.dispatchEvent(new PointerEvent("pointermove", at));
seen.moments.push(moment.querySelector("output").textContent);
seen.cursor = (box(area.querySelector(".cursor")).left - box(area).left) / box(area).width;
parent.postMessage(JSON.stringify(seen), "*");
</script></body>"""


LONG = "double (segment 4, chunk 13, slots 5, disk)"


def crowded(chosen: int, count: int = 12, **fields: Any) -> Loop:
    """A recurrence with plans close to each other, on a falling curve and just above it; one of them is chosen."""
    plans = [
        Alternative(LONG if number == chosen else f"plan {number}", 3_000 - 200 * number, 1 + 0.1 * number, 0)
        for number in range(count)
    ]
    beaten = [replace(plan, peak=plan.peak + 150, seconds=plan.seconds + 0.05) for plan in plans]
    plans[chosen] = replace(plans[chosen], chosen=True)
    return loop(alternatives=(*plans, *beaten), costs=COSTS, **fields)


def deep() -> Report:
    """A report on blocks over depth."""
    made = loop("standard", costs=COSTS)
    recurrence = replace(made.recurrence, blocks=True, modules=tuple(f"blocks.{i}" for i in range(24)))
    plans = (Alternative("standard", 400, 0.2, 24, chosen=True), Alternative("store_all", 900, 0.1, 0))
    return report(replace(made, recurrence=recurrence, alternatives=plans))


REPORTS: dict[str, Callable[[], Report]] = {
    "full": full,
    "long": lambda: report(loop(steps=1_200, chunk=30, slots=5, costs=COSTS)),
    "several": lambda: report(crowded(0), crowded(5), crowded(11, schedule="standard", steps=12)),
    "deep": deep,
}
Reader = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def seen_at(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """What a reader sees of a report, by its name, in a window of some pixels."""
    return cache(lambda name, width: read(REPORTS[name](), tmp_path_factory.mktemp(name), width))


def read(made: Report, folder: Path, width: int) -> dict[str, Any]:
    """What a reader sees of a report in a window of ``width`` pixels."""
    made.save_html(folder / "plan.html")
    text = (folder / "plan.html").read_text("utf-8").replace("</body>", READER)
    (folder / "read.html").write_text(text, "utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), "utf-8")
    command = [str(CHROMIUM), *QUIET.split(), f"--user-data-dir={folder / 'profile'}", "--window-size=2000,2400"]
    command += ["--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    found: dict[str, Any] = json.loads(html.unescape(title))
    assert found["width"] == width
    return found


@pytest.mark.parametrize(
    ("name", "width", "charts"), [("full", 1920, 6), ("full", 1280, 6), ("full", 390, 6), ("long", 390, 6)]
)
def test_a_reader_sees_all(name: str, width: int, charts: int, seen_at: Reader) -> None:
    seen, shown = seen_at(name, width), REPORTS[name]()
    assert seen["wide"] <= 0, "the page is wider than the window"
    assert len(seen["charts"]) == charts
    assert all(wide > 200 and high >= 16 for wide, high in seen["charts"])
    assert all(seen["labels"]), "labels of an axis overlap"
    assert seen["edges"] == 0, "a label is cut by the window"
    assert len(set(seen["colours"])) == 2
    trace = shown.loops[0].trace()
    everything, found, none, again = seen["rows"]
    assert everything == again == min(trace.instructions, 1_001)
    assert 0 < found < everything
    assert seen["count"] == f"{found} of {everything}"
    assert none == 0
    first, start, middle = seen["moments"]
    assert first.startswith(f"{trace.at_peak()} at ")
    assert start not in (first, middle)  # the peak may lie in the middle
    assert 0.45 <= seen["cursor"] <= 0.5


WINDOWS = [("full", 1920), ("full", 1280), ("full", 390), ("several", 1280), ("several", 390), ("deep", 390)]


@pytest.mark.parametrize(("name", "width"), WINDOWS)
def test_tiles_stand_in_one_row_and_nothing_overlaps(name: str, width: int, seen_at: Reader) -> None:
    seen = seen_at(name, width)
    tops = [top for top, _ in seen["tiles"]]
    assert len(tops) >= 4
    assert all(over <= 0 for _, over in seen["tiles"]), "a figure is wider than its tile"
    assert (len(set(tops)) == 1) == (width > 1000)  # on a phone there are rows of two
    assert seen["wide"] <= 0
    assert all(seen["labels"]), "labels of an axis overlap"
    assert all(seen["notes"]), "turn and budget overlap"


@pytest.mark.parametrize(("name", "width"), WINDOWS)
def test_the_name_of_the_chosen_plan_lies_on_nothing(name: str, width: int, seen_at: Reader) -> None:
    seen, loops = seen_at(name, width), REPORTS[name]().loops
    assert seen["points"] == sum(len(each.alternatives) for each in loops)
    assert seen["overlaid"] == len(loops) * [{"points": 0, "legends": 0}]


@pytest.mark.parametrize(("name", "width"), WINDOWS)
def test_tables_scroll_within_the_window(name: str, width: int, seen_at: Reader) -> None:
    tables = seen_at(name, width)["tables"]
    assert all(table["inside"] and table["reached"] and table["tall"] <= 0 for table in tables)
    if width == 390:
        assert any(table["hidden"] > 20 for table in tables)


@pytest.mark.parametrize(("name", "width"), WINDOWS)
def test_a_button_makes_one_picture_of_the_page(name: str, width: int, seen_at: Reader) -> None:
    seen = seen_at(name, width)
    file, start, length = seen["saved"]
    assert (file, start) == ("reroll.png", "data:image/png;base64,")
    assert length > 50_000
    made, (wide, high), page = seen["picture"], seen["picture"]["size"], seen["picture"]["page"]
    assert made["button"]
    assert 1 <= wide / page[0] <= 4
    assert 2_000 < high <= 16_000
    assert wide * high <= 1.61e7
    if width > 1000:
        assert wide / high == pytest.approx(page[0] / page[1], rel=0.01)
        assert len(made["drawn"]) > 50
        assert min(made["drawn"]) > 1, "the picture lacks something that the page shows"
        assert made["empty"] == 1, "the slider is no part of the picture"


def test_several_loops_stand_side_by_side(seen_at: Reader) -> None:
    for width in (1280, 390):
        seen = seen_at("several", width)
        assert seen["links"] == ["#loop-0", "#loop-1", "#loop-2"]
        assert seen["text"].count("Pareto curve") == 3
        assert len(seen["charts"]) == 2 * 6 + 3  # memory, schedule, curve; of two also the disk's, and its transfers


def test_blocks_over_depth_are_called_blocks(seen_at: Reader) -> None:
    text = seen_at("deep", 390)["text"]
    for words in ("24 blocks", "Blocks over depth", "blocks run again, per block", "blocks re-run"):
        assert words in text
    assert "steps run again" not in text
    assert "24 steps" not in text
