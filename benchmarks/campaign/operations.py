"""Each differentiable operation of torch's own list (OpInfo), as the one operation of a step with a carry.

    python benchmarks/campaign/operations.py                   # float64, eager lowering, then inductor; goes on
    python benchmarks/campaign/operations.py --only cumprod,nn.functional.gelu --again
    python benchmarks/campaign/operations.py --show

The step scales the first operand of torch's own sample by a carry, so that the sample stays in the operation's domain,
and the carry takes up all numbers that come out: ``y = op(sample * (1 + 0.01 tanh(h) x[t]))``. What torch marks as not
differentiable, random, or writing into an operand is left out here; ``programs.py`` has these. Lowered by inductor, a
difference counts where it is more than ten times that of inductor's formulas run by torch
(``aot_eager_decomp_partition``): some of them lose digits (``soft_margin_loss`` far from zero). Plain ``torch.compile``
is no measure, as it may have the same fault. What inductor fuses depends on how many steps a segment has, so the last
way has all six in one.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from judge import DEFECTS, outcome
from record import RESULT, environment, read, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import reroll

STEPS = 6
SAMPLES = 2  # of an operation
SECONDS = 120  # for one sample
WAYS = ("float64 eager", "float32 eager", "float64 inductor", "float64 inductor 6")  # in segments of 2 steps, or 6
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
CHUNK = 8  # operations of one task


@dataclass(frozen=True, eq=False)
class Sample:
    """Operands of an operation; the first one is scaled by the carry."""

    call: Any
    input: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class OneOperation(nn.Module):
    """A loop whose step is one operation."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        self.weight = nn.Parameter(sample.input.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """The last carry, and what the last step's operation gives; x: [T]."""
        h, last = x.new_zeros(()), None
        for t in range(x.shape[0]):
            scaled = self.weight * (1 + 0.01 * torch.tanh(h) * x[t])
            last = self.sample.call(scaled, *self.sample.args, **self.sample.kwargs)
            h = 0.5 * h + torch.tanh(_total(last))
        return h, last


def _total(made: Any) -> Any:
    if isinstance(made, Tensor):
        made = made.abs() if made.is_complex() else made
        return made.mean() if made.is_floating_point() else made.sum() * 0.01
    return sum(_total(each) for each in made)


def names() -> list[str]:
    """The operations with a gradient, variants included, once each."""
    found = (f"{op.name}.{op.variant_test_name}".rstrip(".") for op in op_db if op.supports_autograd)
    return list(dict.fromkeys(found))


def samples(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    """The first samples of an operation whose first operand is one tensor of numbers."""
    op = next(op for op in op_db if f"{op.name}.{op.variant_test_name}".rstrip(".") == name)
    if dtype not in op.supported_dtypes("cpu"):
        return
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        if isinstance(sample.input, Tensor) and sample.input.dtype == dtype and sample.input.numel():
            yield Sample(op.op, sample.input, tuple(sample.args), dict(sample.kwargs))


def judged(wanted: Sequence[str], ways: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """The verdicts of some operations: how many samples ended in each way, and why those that are not equal did."""
    torch.set_num_threads(1)
    return {name: {way: _judged(name, way) for way in ways} for name in wanted}


def _judged(name: str, way: str) -> dict[str, Any]:
    dtype = getattr(torch, way.split()[0])
    (lowering, *longer), counts, reasons = way.split()[1:], Counter[str](), Counter[str]()
    taken = 0
    for sample in samples(name, dtype):
        if taken == (SAMPLES if lowering == "eager" else 1):
            break
        net, x = OneOperation(sample), torch.rand(STEPS, dtype=dtype)
        if not _is_plain(net, x):
            continue
        taken += 1
        torch._dynamo.reset()
        verdict = outcome(lambda net=net, x=x: _differences(net, x, lowering, bool(longer)), SECONDS)  # type: ignore[misc]
        counts[verdict.kind] += 1
        if verdict.kind != "equal":
            reasons[f"{verdict.kind}: {verdict.why}"] += 1
    return {"counts": dict(counts), **({"reasons": dict(reasons)} if reasons else {})}


def _is_plain(net: OneOperation, x: Tensor) -> bool:
    """Whether eager can do the step, with a gradient, to the same numbers twice."""
    try:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first, second = net(x)[0], net(x)[0]
        drawn = not torch.equal(before, torch.get_rng_state())
        first.backward()
    except Exception:  # of whatever kind: it is no sample then  # noqa: BLE001
        return False
    net.zero_grad()
    return bool(torch.equal(first, second)) and bool(first.isfinite()) and not drawn


def _differences(net: OneOperation, x: Tensor, lowering: str, longer: bool) -> Sequence[object]:
    shorter: dict[str, Any] = {"schedule": "double", "segment": 2, "chunk": 2, "slots": 2, "remote": "host"}
    options = {"lowering": lowering, **({"schedule": "standard", "segment": STEPS} if longer else shorter)}
    compiled = torch.compile(net, backend="reroll", options=options)
    with torch._inductor.config.patch(emulate_precision_casts=True):  # else rounding to half is left out, as in torch
        found = reroll.check(compiled, x, measure=False, tolerance=TOLERANCES[x.dtype]).differences
    if not found or lowering == "eager":
        return found
    torch._dynamo.reset()
    formulas = torch.compile(net, backend="aot_eager_decomp_partition")
    plain = reroll.check(formulas, x, measure=False, tolerance=TOLERANCES[x.dtype]).differences
    errors = {each.name: 10 * each.error for each in plain if each.error is not None}
    return [each for each in found if each.error is None or each.error > errors.get(each.name, 0.0)]


def show(section: Mapping[str, Any], console: Console) -> None:
    """How many samples ended how, and all that did not end well."""
    rows = section.get("rows", {})
    table = Table("way", "operations", "samples")
    for way in WAYS:
        found = [row[way] for row in rows.values() if row.get(way, {}).get("counts")]
        counts = sum((Counter(each["counts"]) for each in found), Counter())
        table.add_row(way, str(len(found)), ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common()))
    console.print(table)
    for name, row in rows.items():
        for way, each in row.items():
            for why in each.get("reasons", {}):
                console.print(f"{name}, {way}: {why}", markup=False, highlight=False)


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--ways", default=WAYS, type=lambda text: text.split(","), help=", ".join(WAYS))
    parser.add_argument("--again", action="store_true", help="judge rows that are there already")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def judge_all(given: argparse.Namespace, rows: dict[str, Any]) -> Iterator[None]:
    """Judge what is missing in the rows, and put it there, a few operations at a time."""
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = set()
        for way in given.ways:
            left = [name for name in given.only or names() if given.again or way not in rows.get(name, {})]
            parts = [left[at : at + CHUNK] for at in range(0, len(left), CHUNK)]
            waiting |= {pool.submit(judged, part, (way,)) for part in parts}
        for done in as_completed(waiting):
            for name, found in done.result().items():
                rows[name] = {**rows.get(name, {}), **found}
                tell(name, found)
            yield


def tell(name: str, found: Mapping[str, Any]) -> None:
    """Print defects."""
    for way, each in found.items():
        if bad := [why for why in each.get("reasons", {}) if why.split(":")[0] in DEFECTS]:
            print(f"{name}, {way}: {bad}", flush=True)


def main() -> None:
    given, console = parse(), Console(width=140)
    if unknown := set(given.only or ()) - set(names()):
        raise SystemExit(f"no such operation: {', '.join(sorted(unknown))}")
    section = read(given.out, "operations")
    if not given.show:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        section |= environment("python benchmarks/campaign/operations.py")
        for _ in judge_all(given, section.setdefault("rows", {})):
            write(given.out, "operations", section)
    show(section, console)


if __name__ == "__main__":
    main()
