"""``make test`` on other versions of Python and torch: ``python benchmarks/matrix.py --python PYTHON --torch 2.12.1``.

One run of the whole suite in a virtual environment of its own (``.venv-matrix/``, which ``make`` sets up). What passed,
failed and was skipped goes to ``results/matrix.json``, a row for each pair of versions; a row is measured again when
it is asked for again. ``--show`` prints the rows. Rows are not timed: they may run beside other work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "matrix.json"
Row = dict[str, Any]


def main() -> None:
    """Run the suite once for each torch that is named, and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that makes the environment")
    parser.add_argument("--torch", nargs="*", default=["2.13.0"], help="versions of torch")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time")
    parser.add_argument("--args", default="", help="more arguments for pytest")
    parser.add_argument("--show", action="store_true", help="print what was found before")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows: dict[str, Row] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for torch in [] if options.show else options.torch:
        row = tested(options, torch)
        rows[f"Python {row['python']}, torch {torch}"] = row
        options.out.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    show(rows)


def tested(options: argparse.Namespace, torch: str) -> Row:
    """What became of the suite on one pair of versions."""
    asked = [options.python, "-c", "import platform; print(platform.python_version())"]
    python = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="reroll-matrix-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            "make",
            "test",
            f"PYTHON={options.python}",
            f"VENV=.venv-matrix/{python}-{torch}",
            f"TORCH=torch=={torch}",
            f"WORKERS={options.workers}",
            f"ARGS={options.args} --junitxml={report}",
        ]
        done = subprocess.run(command, cwd=HERE.parent, stdin=subprocess.DEVNULL, check=False)
        found = outcomes(report) if report.exists() else {}
    told = f"python benchmarks/matrix.py --python python{python} --torch {torch} {options.args}".rstrip()
    where = machine(told) | {"python": python, "torch": torch}
    return {"python": python, "environment": where, "exit_status": done.returncode, **found}


def outcomes(report: Path) -> Row:
    """How many tests passed, which failed, and how many were skipped for which reason."""
    failed, skipped, passed = [], Counter[str](), 0
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(name)
        elif "skipped" in kinds:
            skipped[" ".join(kinds["skipped"].get("message", "").split())] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(skipped)}


def show(rows: dict[str, Row]) -> None:
    """A line for each pair of versions, and what failed."""
    console = Console(width=min(140, int(os.environ.get("COLUMNS", "140"))))
    table = Table("versions", "passed", "failed", "skipped", "commit")
    for name, row in rows.items():
        numbers = row.get("passed"), len(row.get("failed", ())), sum(row.get("skipped", {}).values())
        table.add_row(name, *map(str, numbers), row["environment"]["commit"])
    console.print(table)
    for name, row in rows.items():
        for each in row.get("failed", ()):
            console.print(f"{name}: {each} failed", markup=False, highlight=False)


if __name__ == "__main__":
    main()
