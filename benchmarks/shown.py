"""What the README's example and the demos print, kept: ``python benchmarks/shown.py``.

The example is the README's own code, with plain BPTT measured beside it; the demos are run as people run them, with one
thread on one core. ``results/shown.json`` is what README.md and docs/measured.md say (a test compares them).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import machine, pinned

import reroll

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "shown.json"
DEMOS = ("digits", "adding")
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^│ (\w[\w -]*?)  +(.*?) +│$", flags=re.MULTILINE)
COST = re.compile(r"^(plain BPTT|reroll) +([\d.]+) CPU s a step, local peak ([\d.]+) MB$", flags=re.MULTILINE)
OUTCOME = re.compile(r"^(?:Accuracy on (?P<held_out>\d+) held-out digits|\.\.\. .*): (?P<value>[\d.]+)$", re.MULTILINE)


def example() -> dict[str, Any]:
    """The README's example: its report, and its peaks in bytes."""
    names: dict[str, Any] = {"__name__": "example"}
    with contextlib.redirect_stdout(io.StringIO()):
        for source in BLOCK.findall((ROOT / "README.md").read_text("utf-8"))[:2]:
            exec(compile(source, "README.md", "exec"), names)
    model, x = names["model"], names["x"]
    model.zero_grad()
    plain = reroll.measure(lambda: model(x).square().mean().backward(), exclude=[model])
    return {
        "report": dict(ROW.findall(names["report"].text(140))),
        "predicted": names["report"].predicted_peak,
        "measured": names["cost"].local_peak,
        "plain": plain.local_peak,
    }


def demo(name: str, core: int) -> dict[str, Any]:
    """What a demo prints: how well it learned, and what a step takes."""
    command = ["taskset", "-c", str(core), sys.executable, str(ROOT / "demos" / f"{name}.py")]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(command, env=alone, capture_output=True, text=True, check=True).stdout
    outcome = OUTCOME.search(text)
    assert outcome is not None, text
    costs = {who: {"cpu_s": float(seconds), "mb": float(peak)} for who, seconds, peak in COST.findall(text)}
    return {"outcome": float(outcome["value"]), "held_out": outcome["held_out"], **costs}


def main() -> None:
    """Run all of them, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=1)
    core = parser.parse_args().core
    with pinned(core):
        result = {"example": example()}
        result["environment"] = machine(f"python benchmarks/shown.py --core {core}")
    result |= {name: demo(name, core) for name in DEMOS}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
