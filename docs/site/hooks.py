"""What MkDocs does for this site besides: notebooks become pages, and so does what the pages link to outside of docs/.

Pages are written for the repository, where links lead from file to file. The site holds copies of the few files above
docs/ that pages link to, under ``repository/``.
"""

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from cells import as_markdown, printed_by

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
PICTURES = "benchmarks/results/*.png"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")


def on_startup(**_: Any) -> None:
    """Let mkdocstrings find ruff, with which it breaks signatures into lines, beside the Python that runs."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks as pages, and the files from outside of docs/."""
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        printed = printed_by(path) if config.extra["run"] else None
        place = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, place, content=as_markdown(path, printed)))
    for path in (*(ROOT / name for name in OUTSIDE), *sorted(ROOT.glob(PICTURES))):
        place = f"repository/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, place, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where files are on the site."""
    here = PurePosixPath(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        target = site_place(repository_place(here).parent / found[0])
        return os.path.relpath(target, here.parent) if target and files.get_file_from_path(target) else found[0]

    return LINK.sub(moved, markdown)


def repository_place(place: PurePosixPath) -> PurePosixPath:
    """Where a file of the site is in the repository."""
    outside = place.parts[0] == "repository"
    return PurePosixPath(*place.parts[1:]) if outside else PurePosixPath("docs") / place


def site_place(path: PurePosixPath) -> str | None:
    """Where a file of the repository is on the site; None for what is no file of it."""
    plain = os.path.normpath(path)
    if plain.startswith("..") or not (ROOT / plain).is_file():
        return None
    if plain.endswith(".ipynb"):
        plain = f"{plain.removesuffix('.ipynb')}.md"
    return plain.removeprefix("docs/") if plain.startswith("docs/") else f"repository/{plain}"
