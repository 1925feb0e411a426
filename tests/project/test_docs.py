"""The site of the documentation: its notebooks run, its reference is complete, and it builds without a warning."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cells
import reroll
from pages import DOCS, NOTEBOOKS, PAGES, codes, section
from reroll import errors
from sources import PACKAGES, ROOT, Source, sources

READ = re.compile(r"os\.(?:environ(?:\.\w+)?|getenv)[\[(]([^\s,\])]+)|^(\S+) (?:not )?in os\.environ$")
ELSEWHERE = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?(?:https?:)?//|<link rel=\"?(?:style|pre)[^>]*//")
"""What a page loads from another machine."""
TORCHS = {
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_LOGS", "TORCH_TRACE"),
    *("CXX", "OMP_NUM_THREADS", "TMPDIR"),
}
"""Variables that torch and Python read for us, of which the page tells, too."""

WARNED = "docs/reference/warnings.md"
WARNINGS = re.findall(r'^### "(.+)"$', PAGES[WARNED], flags=re.MULTILINE)
"""What stands in the text of each warning."""


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS)
def test_the_cells_of_a_notebook_run(page: str) -> None:
    printed = cells.printed_by(NOTEBOOKS[page])
    assert any(printed)


def test_a_cell_that_raises_is_noticed(tmp_path: Path) -> None:
    notebook = tmp_path / "wrong.ipynb"
    notebook.write_text('{"cells": [{"cell_type": "code", "source": ["assert 1 == 2, \'no\'"]}]}', "utf-8")
    with pytest.raises(RuntimeError, match="AssertionError: no"):
        cells.printed_by(notebook)


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_notebooks_are_stored_without_outputs(page: str) -> None:
    text = NOTEBOOKS[page].read_text("utf-8")
    assert '"outputs": []' in text
    assert not re.search(r'"outputs": \[[^\]]|"execution_count": \d', text)


def test_every_error_has_an_entry() -> None:
    """A heading, a cause and a remedy; of the base of all a sentence."""
    named = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    kinds = {name for name in named if not issubclass(getattr(errors, name), Warning)}
    entries = set(re.findall(r"^## (\w+Error)$", PAGES["docs/reference/errors.md"], flags=re.MULTILINE))
    assert entries == kinds & set(reroll.__all__)
    for name in kinds - {"RerollError"}:
        text = section("docs/reference/errors.md", name)
        assert "*Cause:*" in text, name
        assert "*Remedy:*" in text, name


def warned(source: Source) -> Iterator[str]:
    """The texts in each function of a source that warns; of its whole file, where a function holds no sentence."""
    for function in source.nodes:
        if isinstance(function, ast.FunctionDef) and re.search(r"\bwarn\(", ast.unparse(function)):
            own = _texts(*function.body[ast.get_docstring(function) is not None :])
            yield own if re.search(r"\w+ \w+ \w+ \w+", own) else _texts(source.tree)


def _texts(*trees: ast.AST) -> str:
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_a_warning_without_an_entry_is_noticed() -> None:
    known = f"def old() -> None:\n    warn({WARNINGS[0]!r} + ' now.')\n"
    new = 'def new() -> None:\n    """One more."""\n    warn("Nobody has written an entry for this.")\n'
    first, second = warned(Source("passes/a.py", known + new))
    assert any(each in first for each in WARNINGS)
    assert not any(each in second for each in WARNINGS)


def test_every_warning_has_an_entry() -> None:
    of_users = [source for source in sources() if source.folder in PACKAGES and not source.path.endswith("errors.py")]
    texts = {source.path: list(warned(source)) for source in of_users}
    missing = [path for path, found in texts.items() for text in found if not any(each in text for each in WARNINGS)]
    assert not missing
    everything = "\n".join(_texts(source.tree) for source in of_users)
    assert not [phrase for phrase in WARNINGS if phrase not in everything]
    assert sum(map(len, texts.values())) > 20


def test_every_entry_of_a_warning_says_what_it_means_and_what_to_do() -> None:
    for phrase in WARNINGS:
        text = PAGES[WARNED].split(f'### "{phrase}"')[1].split("\n##")[0]
        assert "*Means:*" in text, phrase
        assert "*Do:*" in text, phrase


def test_every_option_and_keyword_is_on_the_options_page() -> None:
    page = "docs/options.md"
    assert {name for row in codes(section(page, "All options")) for name in row} == set(reroll.Options.__slots__)
    keywords = {name for row in codes(section(page, "Arguments of `reroll.compile`")) for name in row}
    assert keywords == {name for name in inspect.signature(reroll.compile).parameters if name != "options"}


def variables(source: Source) -> Iterator[str]:
    """The environment variables that a source reads or sets, where they are named by constants."""
    constants = {
        target.id: node.value.value
        for node in source.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in source.nodes:
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript, ast.Compare)) else ""
        for name in READ.findall(text):
            (found,) = filter(None, name)
            yield str(constants[found]) if found in constants else str(ast.literal_eval(found))


def test_every_environment_variable_is_on_its_page() -> None:
    page = "docs/reference/environment.md"
    read = {name for source in sources() if source.folder in PACKAGES for name in variables(source)}
    own, torchs = (codes(section(page, title)) for title in ("Of reroll and the system", "Of torch"))
    assert read == {name for row in own for name in row}
    assert {name for row in torchs for name in row} == TORCHS


def test_variables_are_found_in_each_spelling() -> None:
    text = "import os\n_A = 'A'\nos.environ.get('B', '')\nos.getenv('C')\nos.environ['D'] = _A in os.environ\n"
    assert set(variables(Source("passes/a.py", text))) == {"A", "B", "C", "D"}


def test_the_navigation_has_every_page() -> None:
    text = (DOCS / "site" / "mkdocs.yml").read_text("utf-8")
    pages = {path.removesuffix(".ipynb").removesuffix(".md") for path in PAGES if path.startswith("docs/")}
    told = re.findall(r"([\w/-]+)\.md$", text.split("nav:")[-1], flags=re.MULTILINE)
    assert {f"docs/{name}" for name in told if not name.startswith("repository/")} == pages
    assert len(told) == len(set(told))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="the extra docs (mkdocs-material) is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Notebooks are not run here; another test does. Nothing that a page loads lies on another machine."""
    subprocess.run([sys.executable, "-c", "import build_backend; build_backend.link()"], cwd=ROOT, check=True)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    told = {"REROLL_DOCS_RUN": "false", "NO_MKDOCS_2_WARNING": "1"}
    config = ["--config-file", str(DOCS / "site" / "mkdocs.yml")]
    done = subprocess.run([*command, *config], env=os.environ | told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    assert len(pages) >= len(PAGES)
    assert not [path for path, text in pages.items() if ELSEWHERE.search(text)]
    assert "memory_budget" in pages[site / "reference" / "api.html"]
