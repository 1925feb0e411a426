"""The page in headless Chromium: no error, charts are there, nothing overlaps, filters and sliders work."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reports import COSTS, full, loop, report
from reroll.report.report import Report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += (
    " --disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --virtual-time-budget=3000"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

# Plays a reader, and leaves what it saw as the page's title, which --dump-dom prints.
READER = """<script>
const box = (node) => node.getBoundingClientRect();
const shown = (selector, root) => [...(root || document).querySelectorAll(selector)].filter((n) => box(n).width > 0);
const apart = (nodes) => nodes.every((a, i) => nodes.slice(i + 1).every((b) => {
  const [p, q] = [box(a), box(b)];
  return p.right <= q.left || q.right <= p.left || p.bottom <= q.top || q.bottom <= p.top;
}));
const type = (input, text, event) => { input.value = text; input.dispatchEvent(new Event("input")); };
document.querySelectorAll("details").forEach((details) => { details.open = true; });
const seen = { wide: document.documentElement.scrollWidth - window.innerWidth };
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
document.title = JSON.stringify(seen);
</script></body>"""


def read(made: Report, folder: Path, width: int) -> dict[str, Any]:
    """What a reader sees of a report in a window of ``width`` pixels."""
    made.save_html(folder / "plan.html")
    text = (folder / "plan.html").read_text("utf-8").replace("</body>", READER)
    (folder / "read.html").write_text(text, "utf-8")
    command = [str(CHROMIUM), *QUIET.split(), f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400"]
    command += ["--dump-dom", (folder / "read.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    found: dict[str, Any] = json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return found


@pytest.mark.parametrize(
    ("made", "width", "charts"),
    [(full, 1280, 6), (full, 390, 6), (lambda: report(loop(steps=900, chunk=30, slots=5, costs=COSTS)), 390, 6)],
    ids=["1280 px", "390 px", "a long program on a phone"],
)
def test_a_reader_sees_all(made: Any, width: int, charts: int, tmp_path: Path) -> None:
    shown = made()
    seen = read(shown, tmp_path, width)
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
