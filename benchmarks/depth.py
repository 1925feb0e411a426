"""Deep networks within a byte budget: blocks over depth rolled, beside what else there is.

    python benchmarks/depth.py                                # all networks; goes on where it was stopped
    python benchmarks/depth.py --only "GPT 12" --again        # one network, by its name and number of blocks
    python benchmarks/depth.py --jax build/jax/bin/python     # JAX too, in an environment of its own (depth_jax.py)
    python benchmarks/depth.py --show

A row is one contender on one network, in a process of its own with an empty inductor cache, one thread on one core.
Eager runs in the same process, in turns with it; beside JAX, in turns with its process. A training step is the network,
its loss, and the backward.

- first call: CPU seconds of the first training step, those of the C++ compiler included; over a line: beyond those of a
  one-line function by torch.compile, which comes first in the process of each compiled contender
- peak: what the allocator holds in a training step above parameters and their gradients (``reroll.measure``; JAX: the
  temporaries of the compiled program), as a part of eager's; predicted: what ``reroll.explain`` says beforehand
- time: CPU seconds of a training step, medians, eager = 1
- error: the largest difference of any gradient from eager's, relative to that gradient's largest entry. Dropout is off.
  Left out are gradients that are rounding alone: those of BERT's biases of keys, which would be zero without it.
  U-Net's are discontinuous where a ReLU turns: eager in float32 and eager in float64 differ by 1e-2 there

``budget X`` asks for ``memory_budget`` of X of eager's peak, ``least`` for the least that there is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from depth_networks import NETWORKS, loss_of
from depth_peer import JAX_WAYS, peer
from measuring import alone, cost_of, cpu_seconds, gradients, interleaved, machine, pinned, relative_error, summary
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll
from reroll.errors import BudgetError

RESULT = Path(__file__).resolve().parent / "results" / "depth.json"
BLOCKS = ("Block", "BertLayer", "LlamaDecoderLayer", "Residual", "Mixing")
"""The classes whose objects are blocks, for those who checkpoint or compile one at a time."""
NAMES = [f"{name} {blocks}" for name, case in NETWORKS.items() for blocks in case.blocks]
LIMIT = 1800  # seconds for one row
ROUNDING = 1e-8
"""Gradients whose largest entry is below this part of the network's largest are rounding alone."""
_ERROR = re.compile(r"[\w.]+Error: ")
Row = dict[str, Any]


class Trained(nn.Module):
    """A network with its loss, and an example of what both take."""

    def __init__(self, network: nn.Module, example: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.network = network
        self.example = example

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The loss."""
        return loss_of(self.network(x), wanted)


Way = Callable[[Trained, int], Any]
"""From a network and eager's peak in bytes to what is called."""


def by_block(model: Trained, _: int, *, compiled: bool, again: bool) -> Trained:
    """Each block compiled, run again in the backward, or both."""
    for module in [each for each in model.modules() if type(each).__name__ in BLOCKS]:
        call = torch.compile(module.forward) if compiled else module.forward
        module.forward = partial(checkpoint, call, use_reentrant=False) if again else call
    return model


def whole(model: Trained, _: int, budget: float = 1.0) -> Any:
    """The whole model by ``torch.compile``, with torch's own activation memory budget."""
    from torch._functorch import config

    config.activation_memory_budget = budget
    return torch.compile(model)


def ours(model: Trained, eager: int, *, part: float | None = None, **options: Any) -> Any:
    """By reroll, with a budget of a part of eager's peak if one is given."""
    if part is not None:
        options["memory_budget"] = int(part * eager)
    return reroll.compile(model, start="compiled", **options)


def least(model: Trained, _: int, **options: Any) -> Any:
    """By reroll, with the least budget: the one that a refusal names."""
    options["memory_budget"] = _refused(model, **options).nbytes
    return reroll.compile(model, start="compiled", **options)


def _refused(model: Trained, **options: Any) -> BudgetError:
    x, wanted = model.example
    try:
        reroll.compile(model, start="compiled", memory_budget=1, **options)(x, wanted)
    except BudgetError as error:
        torch._dynamo.reset()
        return error
    raise AssertionError("one byte is too little")


PARTS = (0.11, 0.16, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WAYS: Mapping[str, Way] = {
    "eager": lambda model, _: model,
    "checkpoint of each block": partial(by_block, compiled=False, again=True),
    "each block by torch.compile": partial(by_block, compiled=True, again=False),
    "each block by torch.compile, with checkpoints": partial(by_block, compiled=True, again=True),
    "torch.compile": whole,
    **{f"torch.compile, activation budget {part}": partial(whole, budget=part) for part in (0.1, 0.3, 0.5, 0.7, 0.9)},
    "reroll": ours,
    "reroll, store_all": partial(ours, schedule="store_all"),
    "reroll, standard": partial(ours, schedule="standard"),
    "reroll, double with disk": partial(ours, schedule="double", remote="disk"),
    **{f"reroll, budget {part:.2f}": partial(ours, part=part) for part in PARTS},
    "reroll, least": least,
}


def row(name: str, way: str, rounds: int, core: int, jax: str = sys.executable) -> Row:
    """What a contender takes, here, in a process that has done nothing else. ``jax``: the Python that has it."""
    kind, blocks = name.rsplit(" ", 1)
    case = NETWORKS[kind]
    torch.manual_seed(0)
    x, wanted = example = case.batch()
    model, plain = (Trained(case.make(int(blocks)), example) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    _without_dropout(model)
    _without_dropout(plain)
    with pinned(core):
        eager = partial(_step, plain, plain, x, wanted)
        expected = gradients(eager, plain)
        eager_peak = _peak(eager, plain)
        if way in JAX_WAYS:
            return {"eager_peak": eager_peak, **_row_of_jax(jax, name, way, plain, rounds)}
        line = _one_line() if "compile" in way or way.startswith("reroll") else 0.0
        begin = cpu_seconds()
        run = WAYS[way](model, eager_peak)
        step = partial(_step, run, model, x, wanted)
        step()
        own = cpu_seconds() - begin
        found: Row = {"first_s": line + own, "over_one_line_s": own}
        found |= {"relative_error": relative_error(gradients(step, model), expected, ROUNDING)}
        found |= {"eager_peak": eager_peak, "peak": _peak(step, model)}
        if way.startswith("reroll"):
            report = reroll.explain(run, x, wanted)
            found |= {"predicted_peak": report.predicted_peak, "plans": _plans(report)}
        steps = {"eager": eager, way: step}
        return found | {"time": summary(interleaved(steps, rounds), "eager")[way]}


def _one_line() -> float:
    """CPU seconds of the first training step of a one-line function: what torch.compile takes for anything at all."""
    begin, x = cpu_seconds(), torch.ones(8, requires_grad=True)
    torch.compile(torch.sin)(x).sum().backward()
    torch._dynamo.reset()
    return cpu_seconds() - begin


def _row_of_jax(python: str, name: str, way: str, plain: Trained, rounds: int) -> Row:
    eager = partial(_step, plain, plain, *plain.example)
    expected = gradients(eager, plain)
    names = [each for each, parameter in plain.network.named_parameters() if parameter.grad is not None]
    with peer(python, name, way, plain.network, plain.example) as other:
        error = relative_error([other.gradients[each] for each in names], expected, ROUNDING)
        times = summary(interleaved({"eager": eager, way: other.step}, rounds), "eager")
        return {**other.told, "relative_error": error, "time": times[way]}


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _step(run: Any, model: nn.Module, x: Tensor, wanted: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    run(x, wanted).backward()


def _peak(step: Callable[[], object], model: nn.Module) -> int:
    model.zero_grad(set_to_none=True)
    return cost_of(step, [model]).local_peak


def _plans(report: Any) -> list[str]:
    return [f"{loop.recurrence.steps} blocks: {loop.choice.describe()}" for loop in report.loops]


def measured(name: str, way: str, rounds: int, core: int, jax: str | None) -> Row:
    """A row, in a process of its own."""
    command = [sys.executable, __file__, "--row", name, way, "--core", str(core), "--rounds", str(rounds)]
    command += ["--jax", jax] if jax else []
    try:
        done = alone(command, LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"gave nothing within {LIMIT} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def show(result: Mapping[str, Any], console: Console) -> None:
    """A table for each network."""
    for name, rows in result.items():
        table = Table(
            "", "first call, s", "over a line", "peak, MB", "of eager's", "predicted", "time", "error", title=name
        )
        for way in (way for way in (*WAYS, *JAX_WAYS) if way in rows):
            table.add_row(way, *_cells(rows[way]))
        console.print(table)


def _cells(found: Row) -> list[str]:
    if "failed" in found:
        return [found["failed"]]
    predicted = f"{found['predicted_peak'] / found['peak']:.2f}" if "predicted_peak" in found else ""
    part = f"{found['peak'] / found['eager_peak']:.3f}"
    first, peak = f"{found['first_s']:.1f}", f"{found['peak'] / 1e6:.1f}"
    over = f"{found['over_one_line_s']:.1f}" if found.get("over_one_line_s") else ""
    return [
        first,
        over,
        peak,
        part,
        predicted,
        f"{found['time']['median_ratio']:.2f}",
        f"{found['relative_error']:.0e}",
    ]


def main() -> None:
    """Measure what is not there yet, save after every row, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "WAY"), help="one row here, as JSON")
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, metavar="NETWORK", help="names with blocks")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, *JAX_WAYS], metavar="WAY", help="contenders")
    parser.add_argument("--jax", metavar="PYTHON", help="a Python that has jax; without it JAX is left out")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--show", action="store_true", help="only print the result file")
    parser.add_argument("--rounds", type=int, default=10, help="training steps that are timed")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.row:
        name, way = given.row
        print(json.dumps(row(name, way, given.rounds, given.core, given.jax or sys.executable)))
        return
    ways = [*WAYS, *(JAX_WAYS if given.jax else ())] if given.ways is None else given.ways
    if not given.jax and not given.show and set(ways) & set(JAX_WAYS):
        parser.error("JAX runs in a Python of its own: name it with --jax.")
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    options = f"--rounds {given.rounds} --core {given.core}"
    todo = [] if given.show else [(name, way) for name in given.only for way in ways]
    for name, way in todo:
        rows = result.setdefault(name, {})
        if given.again or way not in rows:
            command = f"python benchmarks/depth.py --only '{name}' --ways '{way}' {options}"
            command += " --jax PYTHON" if way in JAX_WAYS else ""
            rows[way] = measured(name, way, given.rounds, given.core, given.jax) | {"environment": machine(command)}
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=120))


if __name__ == "__main__":
    main()
