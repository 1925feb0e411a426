"""One network of ``tests/networks``, eager and with ``reroll.compile``: a row of the table of ``networks_table.py``.

Eager takes turns with what ``reroll.compile`` made, in the dtype of the test: float64 where the library allows it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import Step, cost_of, empty_caches, gradients, interleaved, relative_error, summary
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from wider import enlarged, wider

import reroll
import reroll.backends.construct.build as share
import reroll.backends.front.recorded as recorded
from reroll.backends.construct.lent import kernels_for
from reroll.backends.inductor.sizes.family import forget
from reroll.capture.recorder.graph import GraphRecorder
from reroll.errors import RerollError

TESTS = Path(__file__).resolve().parent.parent / "tests"
SCHEDULES: dict[str, dict[str, Any]] = {
    "standard": {"schedule": "standard"},
    "double": {"schedule": "double", "remote": "disk"},
}
LENGTHS = (40, 41, 43, 46, 50, 57, 71, 90)  # with the first length and that of the measured step: ten
EAGER = "eager"


sys.path[:0] = [str(folder) for folder in (TESTS / "networks", *(TESTS / "support").iterdir())]


def cases() -> dict[str, Any]:
    """The networks by name, as the tests have them, and one that may be refused."""
    import test_networks  # found only now
    from training import Case

    def packed(steps: int) -> tuple[Tensor, Tensor]:
        return torch.randn(steps, 2, 3), torch.tensor([steps, steps - 2])

    settings = {"allow_rnn": True}
    return test_networks.CASES | {"torch-packed_sequence": Case(test_networks.Packed, packed, (), settings=settings)}


class Row:
    """A network, its inputs at any length, and a training step of it."""

    def __init__(self, case: Any, batch: int, width: int) -> None:
        self.case = case
        images = any(value.ndim > 3 for value in tree_leaves(self.case.inputs(8)))
        self.batch, self.width = (max(batch // 2, 1), max(width // 4, 1)) if images else (batch, width)
        torch.manual_seed(4)
        with wider(self.width):
            self.model: nn.Module = case.make()

    def inputs(self, steps: int) -> Any:
        """One batch."""
        torch.manual_seed(5)
        return enlarged(self.case.inputs(steps), steps, self.case.time, self.batch, self.width)

    def forward(self, run: Callable[..., Any], steps: int) -> Callable[[], list[Tensor]]:
        """One forward from a new state."""
        inputs = self.inputs(steps)

        def forward() -> list[Tensor]:
            self.case.restart(self.model)
            self.case.reset(self.model)
            torch.manual_seed(0)
            return [value for value in tree_leaves(run(*inputs)) if isinstance(value, Tensor)]

        return forward

    def step(self, run: Callable[..., Any], steps: int) -> Step:
        """One forward and backward from a new state into fresh gradients."""
        forward = self.forward(run, steps)

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            loss_of(forward()).backward()

        return step


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A number that depends on every entry of every output, and holds little memory."""
    return torch.stack([(i + 1) * value.sin().mean() for i, value in enumerate(outputs) if value.requires_grad]).sum()


class Counts:
    """How many records of models were made, and how often segments were compiled, from here on."""

    def __init__(self) -> None:
        self.graphs = self.segments = 0

        def counted_recorder(*args: Any, **how: Any) -> Any:
            self.graphs += 1
            return GraphRecorder(*args, **how)

        def counted_kernels(*args: Any) -> Any:
            self.segments += 1
            return kernels_for(*args)

        setattr(recorded, "GraphRecorder", counted_recorder)  # noqa: B010  # names that the modules import
        setattr(share, "kernels_for", counted_kernels)  # noqa: B010

    def now(self) -> dict[str, int]:
        """Both numbers."""
        return {"graphs": self.graphs, "segments": self.segments}


def wall(call: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def first_calls(row: Row, run: Callable[..., Any], length: int, calls: int, counts: Counts) -> dict[str, Any]:
    """Wall seconds of the first forwards at a length, and what was compiled by then."""
    seconds, seen = [], []
    for _ in range(calls):
        seconds.append(wall(row.forward(run, length)))
        seen.append(counts.now())
    return {"first_length": length, "first_calls_s": seconds, "compiled_after_first_calls": seen}


def measured(row: Row, schedule: str, options: dict[str, Any]) -> dict[str, Any]:
    """The figures of one schedule."""
    counts, steps = Counts(), options["steps"]
    chosen = {**SCHEDULES[schedule], "lowering": options["lowering"]}
    run = reroll.compile(row.model, start="compiled", **chosen)
    found = first_calls(row, run, **options["first"][schedule], counts=counts)
    expected, step = gradients(row.step(row.model, steps), row.model), row.step(run, steps)
    found["relative_error"] = relative_error(gradients(step, row.model), expected)
    if schedule == "standard":
        for length in LENGTHS:
            row.step(run, length)()
        found["compiled_after_ten_lengths"] = counts.now()
    contenders = {EAGER: row.step(row.model, steps), schedule: step}
    found["time"] = summary(interleaved(contenders, options["rounds"]), EAGER)
    found["local_peak_bytes"] = {}
    for name, each in contenders.items():
        row.model.zero_grad(set_to_none=True)
        found["local_peak_bytes"][name] = cost_of(each, [row.model]).local_peak
    return found


@contextmanager
def anew() -> Iterator[None]:
    """Nothing is compiled yet."""
    torch.compiler.reset()
    forget()
    with empty_caches() as caches, mock.patch.dict(os.environ, caches):
        yield


def main(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The figures, or the sentence of a refusal."""
    torch.set_num_threads(1)
    import training  # a module of the tests, found only now

    case = cases()[name]
    row: dict[str, Any] = {"dtype": str(case.dtype).removeprefix("torch.")}
    with training.precision(case.dtype), training.quiet(case):
        made = Row(case, options["batch"], options["width"])
        row |= {"batch": 2 * made.batch, "width": made.width, "steps": options["steps"]}
        for schedule in options["first"]:
            with anew():
                try:
                    row[schedule] = measured(made, schedule, options)
                except (RerollError, RuntimeError) as error:
                    row[schedule] = {"refused": f"{type(error).__name__}: {error}"[:900]}
    return row
