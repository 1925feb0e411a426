"""The pages of the documentation as text: README.md, docs/ and its notebooks; their blocks, links and sections."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import cells
from sources import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = {path.relative_to(ROOT).as_posix(): path for path in sorted(DOCS.rglob("*.ipynb"))}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
} | {name: cells.as_markdown(path) for name, path in NOTEBOOKS.items()}
"""The text of every page, by its path; of a notebook its cells."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: str, language: str) -> list[str]:
    return [source for found, source in FENCE.findall(PAGES[page]) if found == language]


def small(source: str) -> str:
    """The same with fewer steps and without inductor, where a block does not name a lowering."""
    source = source.replace("1_000", "60")
    source = source.replace("reroll.compile(", 'functools.partial(reroll.compile, lowering="eager")(')
    return re.sub(r"options=\{(?!.*lowering)", 'options={"lowering": "eager", ', source)


def play(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page in a namespace of their own."""
    namespace: dict[str, Any] = {"__name__": "page", "functools": functools}
    for number, source in enumerate(blocks(page, "python")):
        cells.play(f"{page}, block {number}", small(source), namespace)
    return namespace


def section(page: str, title: str) -> str:
    return PAGES[page].split(f"\n## {title}\n")[1].split("\n## ")[0]


def codes(text: str) -> list[list[str]]:
    """The code words of the first cells of the tables in a text."""
    return [re.findall(r"`([\w-]+)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("| `")]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", path.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[tuple[Path, str]]:
    """The relative links of a page: the file and the anchor."""
    found = (link.partition("#") for link in LINK.findall(PAGES[page]) if "://" not in link)
    return [((ROOT / page).parent / name if name else ROOT / page, anchor) for name, _, anchor in found]
