"""What the README shows is true: its Python runs, in order and at a small size, and what it names exists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import reroll
from reroll.program.program import INSTRUCTIONS
from reroll.program.registry import find as find_pass
from reroll.schedules.named import find, schedule_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def small(source: str) -> str:
    """The same with fewer steps and without inductor."""
    return source.replace("1_000", "60").replace("time_dim=0", 'time_dim=0, lowering="eager"')


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The first cells' code words of the tables in a text."""
    return [re.findall(r"`([\w-]+)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.usefixtures("fresh_registry")
def test_python_blocks_run_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the report is saved where the user is
    namespace: dict[str, Any] = {"__name__": "readme"}
    for source in blocks("python"):
        exec(compile(small(source), "README.md", "exec"), namespace)
    text = capsys.readouterr().out
    for label in [line.split("  ")[0].strip() for line in blocks("text")[0].splitlines()]:
        assert f"│ {label} " in text, label
    assert "reload_at" in text
    assert {"plan.html", "plan.json"} <= {path.name for path in tmp_path.iterdir()}
    grads = [parameter.grad for parameter in namespace["model"].parameters()]
    namespace["model"].zero_grad()
    namespace["model"](namespace["x"]).square().mean().backward()
    plain = [parameter.grad for parameter in namespace["model"].parameters()]
    calls = 2  # by measure, after the example's gradients were dropped
    for got, one in zip(grads, plain, strict=True):
        torch.testing.assert_close(got, calls * one)


def test_the_options_are_those_of_the_table() -> None:
    named = [name for row in rows(section("Options")) for name in row]
    assert named == [name for name in named if name in reroll.Options.__slots__]
    assert set(named) == set(reroll.Options.__slots__)


def test_the_schedules_are_those_of_the_table() -> None:
    _, *named = [row[0] for row in rows(section("Schedules"))]
    assert set(named) <= set(schedule_names())
    assert {name for name in schedule_names() if "remote" in find(name).numbers} <= {*named, "double_merged"}


def test_the_passes_and_instructions_are_those_of_the_text() -> None:
    text = section("A pass of your own")
    instructions = text[text.index("nine instructions:") : text.index("A pass maps")]
    names = {target.__name__ for target in INSTRUCTIONS} - {"getitem"}
    assert set(re.findall(r"`(\w+)`", instructions)) == names
    drawn = re.findall(r"\|    ([a-z-]+) +", section("How it works"))
    assert tuple(drawn) == reroll.DEFAULT_PASSES
    assert find_pass("trim").on == "program"


def test_the_files_that_are_named_exist() -> None:
    for name in re.findall(r"demos/\w+\.py|\]\(([\w.]+)\)", README):
        assert not name or (ROOT / name).exists()
    assert all((ROOT / name).exists() for name in re.findall(r"demos/\w+\.py", README))


def figure_rows() -> list[str]:
    """The table of measured figures, as the committed result file has them."""
    result = json.loads((ROOT / "benchmarks/results/figures.json").read_text("utf-8"))
    rows = []
    for name, memory in result["memory"].items():
        ratio = result["time"][name]["least_ratio"]
        rows.append(f"| {name} | {memory['local_peak_bytes'] / 1e6:.1f} MB | {ratio:.2f} |")
    return rows


def test_the_measured_figures_are_those_of_the_result_file() -> None:
    table = section("Measured").split("\n\n")
    assert [line for part in table for line in part.splitlines() if line.startswith("| ")][1:] == [
        "| --- | --- | --- |",
        *figure_rows(),
    ]


def test_the_table_of_networks_is_that_of_its_result_file() -> None:
    found = [
        line.split(" | ")[1:] for line in section("Time and memory of other networks").splitlines() if "MB," in line
    ]
    result = json.loads((ROOT / "benchmarks" / "results" / "speed.json").read_text("utf-8"))
    rows = []
    for network in result.values():
        eager, *others = (
            network["contenders"][name] for name in ("eager BPTT", "reroll", "reroll, standard", "JAX nested remat")
        )
        cells = [f"{megabytes(eager)} MB, {1e3 * eager['median_s']:.0f} ms"]
        rows.append([*cells, *(f"{megabytes(each)} MB, {each['median_ratio']:.2f}" for each in others)])
    assert [[cell.removesuffix(" |") for cell in row] for row in found] == rows


def megabytes(contender: dict[str, Any]) -> str:
    found = contender["local_peak_bytes"] / 1e6
    return f"{found:.1f}" if found >= 0.95 else f"{found:.2f}"
