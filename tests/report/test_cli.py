"""The command line, in process; once as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import reroll
from reroll.passes import DEFAULT_PASSES
from reroll.program.context import Context
from reroll.program.program import Program
from reroll.report.cli import commands as cli
from reroll.report.cli.commands import main
from reroll.schedules.machine import Machine

NETWORK = ["--carry", "64KiB", "--tape", "512KiB", "--forward", "0.3ms", "--backward", "0.7ms"]
LONG = ["plan", "--steps", "100000", *NETWORK]
MACHINE = Machine.of({"disk": {"write": "1GB/s", "read": "2GB/s", "capacity": "100MB"}, "host": "9GB/s"}, name="here")


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured."""
    monkeypatch.setattr(reroll, "calibrate", lambda **_: MACHINE, raising=False)
    monkeypatch.setattr(reroll, "doctor", lambda: (), raising=False)
    monkeypatch.setattr(reroll, "total_memory", lambda: 2**40, raising=False)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*LONG, *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_steps_may_be_written_as_1e5(capsys: pytest.CaptureFixture[str]) -> None:
    found = [planned(capsys, "--steps", text) for text in ("100000", "1e5", "1E+5")]
    assert found[0] == found[1] == found[2]


def test_the_table_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LONG, "--budget", "16MiB", "--remote", "2GB/s"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert "100,000 steps, carries of 64 KiB, tapes of 512 KiB a step" in lines[0]
    schedules = [line.split()[:3] for line in lines[3:11]]
    assert schedules == [
        ["no", "store_all", "local"],
        ["no", "standard", "local"],
        ["no", "double", "local"],
        ["yes", "revolve", "local"],
        ["yes", "remote", "disk"],
        ["best", "hierarchical", "disk"],
        ["yes", "double", "disk"],
        ["yes", "hrevolve", "disk"],
    ]
    assert "schedule='hierarchical', segment=1, chunk=" in " ".join(lines)
    assert max(map(len, lines)) <= 100


def test_the_table_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "schedules.md").read_text("utf-8")
    command = page.split("\npython -m reroll ")[1].splitlines()[0]
    shown = page.split("\nfits  schedule")[1].split("```")[0].splitlines()[1:]
    assert main(command.split()) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 7
    assert all(line.split() in printed for line in shown)


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--budget", "16MiB", "--remote", "2GB/s")
    assert [row["schedule"] for row in found["rows"] if row["fits"]] == [
        "revolve",
        "remote",
        "hierarchical",
        "double",
        "hrevolve",
    ]
    best = found["recommended"]
    assert best["local_peak"] <= 16 * 2**20
    assert best["seconds"] <= 0.1 + min(row["seconds"] for row in found["rows"] if row["fits"])
    assert best["options"] == {
        "schedule": "hierarchical",
        "segment": 1,
        "chunk": best["chunk"],
        "slots": best["slots"],
        "remote": "disk",
    }
    assert found["least_budget"] <= best["local_peak"]
    double = found["rows"][-2]
    assert double["rerun"] == 200_000
    assert double["seconds"] == pytest.approx(160, rel=1e-3)


def test_what_does_not_fit_says_the_least_that_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LONG, "--budget", "800KiB"]) == 1
    captured = capsys.readouterr()
    assert "No schedule fits the budget 800 KiB (819,200 bytes). The least that would is " in captured.err
    assert "by revolve. Raise" in captured.err
    assert "or name a tier for carries, such as --remote 2GB/s" in captured.err
    assert all(line.startswith("no ") for line in captured.out.splitlines()[3:7])
    nbytes = captured.err.split("would is ")[1].split(" bytes")[0].replace(",", "")
    assert planned(capsys, "--budget", "800KiB", code=1)["recommended"] is None
    assert planned(capsys, "--budget", nbytes)["recommended"]["schedule"] == "revolve"
    assert planned(capsys, "--budget", str(int(nbytes) - 1), code=1)["least_budget"] == int(nbytes)


def test_what_is_recommended_can_be_revolve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LONG, "--budget", "10MiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Use revolve: " in text
    assert "reroll.compile(model, schedule='revolve', segment=1, memory_budget=10485760)" in text
    best = planned(capsys, "--budget", "10MiB")["recommended"]
    assert best["local_peak"] <= 10 * 2**20
    assert 0 < best["rerun"] < 16 * 100_000


def test_without_a_budget_the_least_peaks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LONG) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Without a budget store_all is the fastest" in text
    assert "double (local) with C=" in text
    assert "name a tier: --remote 2GB/s" in text


def test_a_budget_above_what_the_machine_has_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LONG, "--budget", "2TiB"]) == 0
    captured = capsys.readouterr()
    assert "the budget 2 TiB is more than the 1 TiB of memory that this machine has" in captured.err
    assert "Use store_all" in captured.out
    assert main([*LONG, "--budget", "1TiB"]) == 0
    assert capsys.readouterr().err == ""


def test_tiers_from_all_sides(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--budget", "16MiB"]
    slow = planned(capsys, *budget, "--remote", "50MB/s")["recommended"]["seconds"]
    fast = planned(capsys, *budget, "--remote", "50MB/s", "--write", "4GB/s", "--read", "4GB/s")["recommended"]
    late = planned(capsys, *budget, "--write", "4GB/s", "--latency", "10ms")["recommended"]
    beside = planned(capsys, *budget, "--remote", "50MB/s", "--overlap")["recommended"]
    assert slow > late["seconds"] > fast["seconds"]
    assert slow > beside["seconds"]
    here = planned(capsys, *budget, "--remote", "disk")
    assert here["recommended"]["remote_peak"] <= 10**8  # the free space
    assert planned(capsys, *budget, "--remote", "host")["recommended"]["tier"] == "host"


def test_segments_of_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--budget", "64MiB", "--segment", "8", "--remote", "2GB/s")
    rows = {(row["schedule"], row["tier"]): row for row in found["rows"]}
    assert rows["hierarchical", "disk"]["chunk"] % 8 == 0
    assert rows["hierarchical", "disk"]["seconds"] == pytest.approx(130, rel=0.01)
    assert found["recommended"]["seconds"] == pytest.approx(130, rel=0.01)
    with_numbers = planned(capsys, "--chunk", "400", "--slots", "20", "--remote", "2GB/s")["rows"]
    assert {(row["chunk"], row["slots"]) for row in with_numbers if row["schedule"] == "double"} == {(400, 20)}


WRONG: tuple[tuple[list[str], str], ...] = (
    ([*LONG, "--budget", "0"], "--budget='0' must be positive"),
    ([*LONG, "--budget", "-1"], "--budget='-1' is not a size"),
    ([*LONG, "--budget", "12 bananas"], "--budget='12 bananas' is not a size. Write a number of bytes, or a text"),
    (["plan", *NETWORK], "--steps is missing, but every schedule of a plan needs the number of steps"),
    (
        ["plan", "--steps", "unknown", *NETWORK],
        "While it is not known, reroll.schedules.Online says step by step",
    ),
    (["plan", "--steps", "0", *NETWORK], "--steps='0' must be a whole number of at least 1"),
    (["plan", "--steps", "9" * 5000, *NETWORK], "and of 15 digits at most"),
    (["plan", "--steps", "9", *NETWORK, "--carry", "1e19"], "no number may be above 2**50"),
    (["plan", "--steps", "1e15", *NETWORK], "--steps='1e15' must be a whole number"),
    (["plan", "--steps", "1.5e1", *NETWORK], "--steps='1.5e1' must be a whole number"),
    (["plan", "--steps", "10", *NETWORK, "--chunk", "11"], "chunk=11 of steps=10: give 10 at most"),
    (["plan", "--steps", "10", *NETWORK, "--segment", "11"], "segment=11 of steps=10"),
    ([*LONG, "--forward", "nan"], "--forward='nan' is not a time"),
    ([*LONG, "--backward=-1ms"], "--backward='-1ms' is not a time"),
    ([*LONG, "--forward", "0.3 furlongs"], "--forward='0.3 furlongs' is not a time"),
    ([*LONG, "--remote", "0GB/s"], "--remote='0GB/s' must be positive"),
    ([*LONG, "--remote", "tape"], "--remote='tape' is not a bandwidth"),
    ([*LONG, "--write", "2GB"], "--write='2GB' is not a bandwidth"),
    ([*LONG, "--latency", "1ms"], "--latency='1ms' is that of a remote tier. Give its bandwidth"),
    ([*LONG, "--carry", "big"], "--carry='big' is not a size"),
    ([*LONG, "--sloths", "3"], "Unrecognized arguments: --sloths 3. See"),
    (["plan", "--steps", "10"], "The following arguments are required: --carry"),
    (["plam"], "invalid choice: 'plam'"),
    ([], "required: COMMAND"),
)


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=lambda each: "-".join(each[-2:]) if each else "none")
def test_wrong_input_is_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("reroll: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 0
    assert "disk  1 GB/s  2 GB/s      0 s  95.4 MiB" in capsys.readouterr().out
    assert main(["calibrate", "--force", "--json"]) == 0
    assert Machine.from_json(capsys.readouterr().out) == MACHINE


@pytest.mark.usefixtures("fresh_registry")
def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    @reroll.register_pass("mine")
    def mine(program: Program, _context: Context) -> Program:
        """Do nothing, well."""
        return program

    assert main(["passes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found if each["default"]] == list(DEFAULT_PASSES)
    assert found[len(DEFAULT_PASSES)] | {"origin": ""} == {
        "name": "mine",
        "on": "program",
        "default": None,
        "what": "Do nothing, well.",
        "origin": "",
    }
    assert all(each["what"] for each in found)
    assert main(["passes"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mine", "program", "Do", "nothing,", "well."] in lines
    assert ["14", "save", "program", "Split", "the", "tapes"] in [line[:6] for line in lines]


@pytest.mark.parametrize("command", [[], ["plan"], ["calibrate"], ["passes"], ["doctor"]])
def test_help_shows_how(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {' '.join(['python -m reroll', *command])}")
    if command in ([], ["plan"]):
        assert "examples:\n  python -m reroll plan --steps 100000" in text
        assert "exit codes: 0" in text


def test_the_examples_of_the_help_run() -> None:
    lines = [line.strip() for text in (cli._EXAMPLES, cli._PLAN_EXAMPLES) for line in text.splitlines()]
    commands = [line.partition("|")[0].replace("...", " ".join(LONG[1:])) for line in lines]
    examples = [command for command in commands if command.startswith("python -m reroll ")]
    assert len(examples) == 8
    for example in examples:
        assert main(example.removeprefix("python -m reroll ").split()) in (0, 1)


def test_as_a_process_it_is_light(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['reroll', *{[*LONG[:2], '10', *NETWORK]!r}]\n"
        "try: runpy.run_module('reroll', run_name='__main__')\n"
        "except SystemExit as left: print('left with', left.code)\n"
        "print([name for name in sys.modules if name.startswith(('torch._inductor', 'torch._dynamo'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["left with 0", "[]"], done.stderr
    assert "10 steps, carries of 64 KiB" in done.stdout
