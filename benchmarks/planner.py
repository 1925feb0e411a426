"""CPU seconds of the planner itself: a network of many blocks over depth, under budgets.

    python benchmarks/planner.py                  # 1,000 blocks, budgets of 0.5, 0.2 and 0.1 of eager's peak
    python benchmarks/planner.py --show

Planning is all that chooses a plan once a segment is compiled (``reroll.backends.construct.plan.plan``): the schedules
and tapes that are compared, and the program that is made of the one that is taken. Beside it stands the whole of what
reroll does with Dynamo's graph (capture, compilation of a segment by torch's own kernels, what is around the loop).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import reroll.backends.construct.build
import reroll.backends.dynamo.entry

RESULT = Path(__file__).resolve().parent / "results" / "planner.json"
BUDGETS = (0.5, 0.2, 0.1)
WIDTH = 32
Row = dict[str, Any]


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        made: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return made


class Timed:
    """A function, and the CPU seconds of its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        start = time.process_time()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - start


def planned(blocks: int, budget: float) -> Row:
    """The seconds of one first call within a budget."""
    torch.compiler.reset()
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    share: Any = reroll.backends.construct.build
    entry: Any = reroll.backends.dynamo.entry
    options: dict[str, Any] = {"memory_budget": budget, "lowering": "eager"}
    planning, whole = Timed(share.plan), Timed(entry._compile)
    with mock.patch.object(share, "plan", planning), mock.patch.object(entry, "_compile", whole):
        torch.compile(model, backend="reroll", options=options)(torch.randn(64, WIDTH)).sum().backward()
    return {"blocks": blocks, "budget": budget, "planning_s": planning.seconds, "compilation_s": whole.seconds}


def show(found: Row, console: Console) -> None:
    """A row for each budget."""
    table = Table("blocks", "budget", "planning, CPU s", "all of reroll, CPU s")
    for row in found["rows"]:
        table.add_row(
            f"{row['blocks']:,}", str(row["budget"]), f"{row['planning_s']:.3f}", f"{row['compilation_s']:.1f}"
        )
    console.print(table)


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--show", action="store_true", help="print what was measured before")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if not options.show:
        torch.set_num_threads(1)
        where = machine(f"python benchmarks/planner.py --blocks {options.blocks}")
        rows = [planned(options.blocks, budget) for budget in BUDGETS]
        options.out.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")
    show(json.loads(options.out.read_text()), Console())


if __name__ == "__main__":
    main()
