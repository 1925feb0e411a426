"""Depth on a card: a GPT of 24 blocks within a byte budget, beside what else there is, in about 100 seconds a call.

    python benchmarks/card_depth.py [--out FOLDER] [--seconds 100] [--ways NAME ...] [--again] [--tokens 256]
    python benchmarks/card_depth.py --show
    python benchmarks/card_depth.py --device cpu --quick      # tiny sizes and eager lowering: shows that it runs

Width 1,024, 16 heads, 4,096 tokens in all, and the loss. Two points: bfloat16 autocast around the forward, and float32
without TF32. All contenders begin from the same weights and take the same batch. In the order of their importance, each
at both points: a contender is warmed up, its peak is measured, and then it takes turns with the *base*, which is each
block by ``torch.compile``. Budgets are parts of the peak of the base.

- ``warm_up_wall_s``: the first training step. Before it Dynamo is reset, but what inductor has compiled stays on disk,
  so a contender after one with the same kernels is quicker, and a second call of this command too
- ``local_peak_bytes``: of torch's allocator in a training step, above what was there before, without gradients of
  parameters, with ``held_bytes``, which stay from step to step (recorded kernels); ``predicted_peak`` is what
  ``reroll.explain`` says of the same, after the step, with ``working_bytes``, in which recorded kernels work and which
  torch's counters call free
- ``seconds`` and ``base_seconds``: of steps in turns, on the wall until the card is done; ``time_ratio``: of medians
- ``relative_error``: the largest difference of any gradient from eager's at the same point (in bfloat16 both round)

Each contender is saved at once in ``card_depth_<card>.json``; one that fails is there with its error and with what was
measured of it before. The same command goes on from there; ``--again`` measures what is there already once more. None
is begun after ``--seconds``; those are named under ``left_out``.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from card import environment, settings
from card_meter import Meter, meter_of
from card_session import Result, Session, command_line, parsed
from depth import BLOCKS, ROUNDING, Trained, ours
from depth_networks import GPT, text
from measuring import Step, aside, gradients, relative_error
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

import reroll
from reroll.errors import RerollWarning

BASE, HALF, EAGER = "each block by torch.compile", "reroll, budget 0.5", "eager"
_NARROW = 0.1  # how far a predicted peak may be from the measured one, as a part of it


@dataclass(frozen=True)
class Point:
    """A size and a precision. ``autocast``: of the forward; ``backend`` and ``lowering``: what compiles."""

    name: str
    device: torch.device
    autocast: torch.dtype | None
    blocks: int = 24
    width: int = 1024
    heads: int = 16
    batch: int = 16
    tokens: int = 256
    backend: str = "inductor"
    lowering: str = "inductor"

    def precision(self) -> AbstractContextManager[object]:
        """What is around the forward."""
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()


def points(device: torch.device, quick: bool, tokens: int) -> list[Point]:
    """What is measured, the more important one first. ``quick``: sizes that show nothing but that it runs."""
    sizes: dict[str, Any] = {"batch": 4096 // tokens, "tokens": tokens}
    if quick:
        sizes = {"blocks": 4, "width": 32, "heads": 2, "batch": 2, "tokens": 16}
        sizes |= {"backend": "aot_eager_decomp_partition", "lowering": "eager"}  # the partitioner reads torch's budget
    name = f"GPT {sizes.get('blocks', 24)}, {sizes['batch']} x {sizes['tokens']} tokens"
    precisions = {"bfloat16 autocast": torch.bfloat16, "float32": None}
    return [Point(f"{name}, {each}", device, dtype, **sizes) for each, dtype in precisions.items()]


Way = Callable[[Trained, Point, int], Any]
"""From a network of its own, the point and the peak of the base in bytes to what is called."""


def by_block(model: Trained, point: Point, _: int, *, compiled: bool, again: bool) -> Trained:
    """Each block compiled, run again in the backward, or both."""
    for module in [each for each in model.modules() if type(each).__name__ in BLOCKS]:
        call = torch.compile(module.forward, backend=point.backend) if compiled else module.forward
        module.forward = partial(checkpoint, call, use_reentrant=False) if again else call
    return model


def whole(model: Trained, point: Point, _: int, *, budget: float = 1.0) -> Any:
    """All of it by ``torch.compile``. Torch's budget is read at the first call; ``_no_budget`` puts it back."""
    functorch.activation_memory_budget = budget
    return torch.compile(model, backend=point.backend)


def rolled(model: Trained, point: Point, base: int, **options: Any) -> Any:
    """By reroll."""
    return ours(model, base, lowering=point.lowering, **options)


PARTS = {HALF: 0.5, "reroll, budget 0.2": 0.2}
WAYS: Mapping[str, Way] = {
    BASE: partial(by_block, compiled=True, again=False),
    HALF: partial(rolled, part=PARTS[HALF]),
    "reroll": rolled,
    EAGER: lambda model, point, base: model,
    "checkpoint of each compiled block": partial(by_block, compiled=True, again=True),
    "reroll, store_all": partial(rolled, schedule="store_all"),
    "torch.compile": whole,
    "torch.compile, activation budget 0.5": partial(whole, budget=0.5),
    "reroll, budget 0.2": partial(rolled, part=PARTS["reroll, budget 0.2"]),
    "checkpoint of each block": partial(by_block, compiled=False, again=True),
}


@dataclass
class Bench:
    """What the contenders of a point share, made when it is first needed."""

    point: Point
    meter: Meter

    @cached_property
    def plain(self) -> Trained:
        """The network whose weights all have, with the batch."""
        torch.manual_seed(0)
        point = self.point
        x, wanted = (each.to(point.device) for each in text(point.batch, point.tokens)())
        with point.device:
            network = GPT(point.blocks, point.width, point.heads)
            network.places = nn.Embedding(point.tokens, point.width)
        return Trained(network, (x, wanted))

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        """Eager's gradients."""
        found = gradients(self.step(self.plain, self.plain), self.plain)
        self.plain.zero_grad(set_to_none=True)
        return found

    @cached_property
    def base(self) -> Step:
        """A training step of the base, whose segments are compiled at the first call after a reset of Dynamo."""
        model = copy.deepcopy(self.plain)
        return self.step(WAYS[BASE](model, self.point, 0), model)

    def step(self, run: Any, model: Trained) -> Step:
        """A training step into fresh gradients; the precision is of the forward alone."""

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with self.point.precision():
                loss = run(*model.example)
            loss.backward()

        return step


def measured(bench: Bench, way: str, base_peak: int, rounds: int) -> Result:
    """A contender, as far as it comes before it fails."""
    found: Result = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for part in _parts(bench, way, base_peak, rounds):
                found |= part
        except Exception as error:  # noqa: BLE001  # whatever it fails with is what was found of it
            found["error"] = f"{type(error).__name__}: {error}"[:1_000]
    told = [str(each.message) for each in caught if issubclass(each.category, RerollWarning)]
    return found | {"told": list(dict.fromkeys(told))}


def _parts(bench: Bench, way: str, base_peak: int, rounds: int) -> Iterator[Result]:
    meter, expected = bench.meter, bench.expected
    torch._dynamo.reset()
    model = copy.deepcopy(bench.plain)
    if way in PARTS:
        yield {"budget_bytes": int(PARTS[way] * base_peak)}
    meter.settle()
    before = meter.allocated()
    yield {"held_before_bytes": before}  # more from one contender to the next: something is not freed
    begin = time.perf_counter()
    with _no_budget():
        run = WAYS[way](model, bench.point, base_peak)
        step = bench.step(run, model)
        meter.seconds(step)
    yield {"warm_up_wall_s": time.perf_counter() - begin}
    model.zero_grad(set_to_none=True)
    held = meter.allocated() - before
    peak = meter.cost(step, model).local_peak_bytes + held
    yield {"local_peak_bytes": peak, "held_bytes": held, "working_bytes": meter.working()}
    given = [each.grad for each in model.parameters() if each.grad is not None]
    yield {"relative_error": relative_error(given, expected, ROUNDING)}
    del given
    yield from _in_turns(bench, step, rounds)
    if way.startswith("reroll"):
        begin = time.perf_counter()
        yield _explained(bench.point, run, model) | {"explain_wall_s": time.perf_counter() - begin}


@contextmanager
def _no_budget() -> Iterator[None]:
    """Torch's own activation budget is of the whole process: put it back."""
    before = functorch.activation_memory_budget
    try:
        yield
    finally:
        functorch.activation_memory_budget = before


def _in_turns(bench: Bench, step: Step, rounds: int) -> Iterator[Result]:
    """Seconds of the step and of the base, which is compiled here anew; without the base if that fails."""
    meter = bench.meter
    try:
        meter.seconds(bench.base)
        base: Step | None = bench.base
    except Exception as error:  # noqa: BLE001  # the base has an entry of its own; here the contender goes on alone
        base = None
        yield {"base_error": f"{type(error).__name__}: {error}"[:300]}
    seconds, base_seconds = list[float](), list[float]()
    with aside():
        for _ in range(rounds):
            seconds.append(meter.seconds(step))
            if base is not None:
                base_seconds.append(meter.seconds(base))
    yield {"seconds": seconds, "base_seconds": base_seconds}
    if base_seconds:
        yield {"time_ratio": statistics.median(seconds) / statistics.median(base_seconds)}


def _explained(point: Point, run: Any, model: Trained) -> Result:
    """What reroll says of it."""
    with point.precision():
        report = reroll.explain(run, *model.example)
    plans = [f"{loop.recurrence.steps} blocks: {loop.choice.describe()}" for loop in report.loops]
    return {
        "predicted_peak": report.predicted_peak,
        "predicted_parts": report.parts if report.loops else {},
        "plan": "; ".join(plans) or "nothing is rolled",
        "why": [loop.why for loop in report.loops],
        "loop_budget_bytes": [loop.budget for loop in report.loops],
        "notes": list(report.notes),
        "report": report.text(120),
    }


def measure(todo: list[Point], session: Session, options: argparse.Namespace) -> None:
    """Every contender at every point, as far as time allows."""
    benches = [Bench(point, session.meter) for point in todo]
    for way in options.ways:
        for bench in benches:
            _measure_one(bench, way, session, options)


def _measure_one(bench: Bench, way: str, session: Session, options: argparse.Namespace) -> None:
    point, what = bench.point, f"{bench.point.name}, {way}"
    sizes = {key: getattr(point, key) for key in ("blocks", "width", "heads", "batch", "tokens", "backend", "lowering")}
    row = session.result["points"].setdefault(point.name, {**sizes, "contenders": {}})
    entry = row["contenders"].setdefault(way, {})
    if ("error" in entry or "seconds" in entry) and not options.again:
        return
    base_peak = row["contenders"].get(BASE, {}).get("local_peak_bytes", 0)
    if way in PARTS and not base_peak:
        session.leave_out(what, f"its budget is a part of the peak of {BASE}, which is not known")
        return
    session.attempt(entry, what, partial(measured, bench, way, base_peak, options.rounds))


def figures(result: Result) -> Result:
    """The goals; ``met`` is None where what it takes was not measured."""
    return {"goals": [each for name, row in result["points"].items() for each in _goals(name, row["contenders"])]}


def _goals(name: str, entries: Mapping[str, Result]) -> Iterator[Result]:
    half = entries.get(HALF, {})
    peak = half.get("local_peak_bytes")
    yield _goal(f"{name}: time of reroll at half of the peak, of compiled blocks", half.get("time_ratio"), 1.1)
    yield _goal(f"{name}: peak of it, of the budget", _ratio(peak, half.get("budget_bytes")), 1.0, 0.9)
    for way, entry in entries.items():
        if way.startswith("reroll"):
            predicted, peak, working = map(entry.get, ("predicted_peak", "local_peak_bytes", "working_bytes"))
            told, limits = f"{name}: predicted peak of {way}, of the measured one", (1 + _NARROW, 1 - _NARROW)
            yield _goal(told, _ratio(predicted, peak), *limits)
            if working:
                yield _goal(f"{told} and the memory of recorded kernels", _ratio(predicted, peak + working), *limits)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _goal(what: str, value: float | None, most: float, least: float | None = None) -> Result:
    met = None if value is None else (least is None or value >= least) and value <= most
    return {"goal": what, "value": value, "at_most": most, "at_least": least, "met": met}


def show(result: Result, console: Console) -> None:
    """A table for each point, the goals, and what is left out."""
    for name, row in result["points"].items():
        heads = ("", "first, s", "peak, MB", "x base", "budget, MB", "predicted", "ms", "x base", "error", "plan")
        table = Table(*heads, title=name)
        for way, entry in row["contenders"].items():
            table.add_row(way, *_cells(entry, row["contenders"].get(BASE, {})))
        console.print(table)
    goals = Table("goal", "value", "at least", "at most", "met", title="goals")
    for each in result["figures"]["goals"]:
        value = "not measured" if each["value"] is None else f"{each['value']:.3f}"
        least = "" if each["at_least"] is None else f"{each['at_least']:g}"
        met = {None: "?", True: "yes", False: "no"}[each["met"]]
        goals.add_row(each["goal"], value, least, f"{each['at_most']:g}", met)
    console.print(goals)
    for each in result["left_out"]:
        console.print(f"left out: {each['what']}: {each['why']}", markup=False)


def _cells(entry: Result, base: Result) -> list[str]:
    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value * scale, form)

    peak, seconds = entry.get("local_peak_bytes"), entry.get("seconds")
    said = entry.get("error") or entry.get("plan") or "; ".join(entry.get("told", ())) or ""
    return [
        cell(entry.get("warm_up_wall_s"), ".1f"),
        cell(peak, ",.1f", 1e-6),
        cell(_ratio(peak, base.get("local_peak_bytes")), ".3f"),
        cell(entry.get("budget_bytes"), ",.1f", 1e-6),
        cell(_ratio(entry.get("predicted_peak"), peak), ".3f"),
        cell(statistics.median(seconds) if seconds else None, ",.1f", 1e3),
        cell(entry.get("time_ratio"), ".3f"),
        cell(entry.get("relative_error"), ".0e"),
        said.splitlines()[0][:80] if said else "",
    ]


def parse(given: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = command_line(__doc__, 100.0)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY", help="only these")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="points whose names have one of these")
    parser.add_argument("--again", action="store_true", help="measure also what is there already")
    parser.add_argument("--tokens", type=int, default=256, help="length of a text; the batch has 4,096 tokens in all")
    parser.add_argument("--rounds", type=int, default=5, help="steps in turns")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, eager lowering: shows that it runs")
    parser.add_argument("--show", action="store_true", help="measure nothing; tables from the result file")
    return parsed(parser, given)


def main(given: list[str]) -> Result:
    """Measure, save and print."""
    options, begin = parse(given), time.monotonic()
    where = environment(options) | {
        "command": " ".join(["python", "benchmarks/card_depth.py", *given]),
        "precision": "that of the point; no TF32",
    }
    path = options.out / f"card_depth_{re.sub('[^A-Za-z0-9]+', '-', where['device'])}.json"
    if options.show:
        result: Result = json.loads(path.read_text())
    else:
        session = Session.opened(path, meter_of(options.device), options.seconds, where)
        todo = points(options.device, options.quick, options.tokens)
        with settings(options.device):
            measure([each for each in todo if any(text in each.name for text in options.only)], session, options)
        where["took_s"] = time.monotonic() - begin
        result = session.result
        result["figures"] = figures(result)
        session.save()
    result["figures"] = figures(result)
    show(result, Console(width=180))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
