"""The networks that others wrote (``tests/networks``), every one under every schedule, through both doors, and so on.

    python benchmarks/campaign/libraries.py                  # go on where the committed result ended
    python benchmarks/campaign/libraries.py --only torch-gru_cell,plain-delays --again
    python benchmarks/campaign/libraries.py --show

Each is trained for three batches beside its eager twin, and compared in outputs, gradients, states, parameters and the
random number that follows:

- ``backend``: each schedule of ``training.SCHEDULES``;
- ``compile``: the same through ``reroll.compile``, where one compiled model sees batches of 13, 4 and 33 steps;
- ``options``: through the backend, with a memory budget, without packing, and with segments of one step;
- ``without``: through the backend, with one of the default passes left out;
- ``inductor``: lowered by inductor, through the backend in segments of two steps, through ``reroll.compile`` in longer
  ones; what draws random numbers is not compared, as inductor's are others;
- ``taylor``: whether the compiled gradient is the derivative of the eager loss, by Taylor's rate: the rest of the first
  order is quartered where the step is halved. Left out where the loss is not smooth, which eager's gradient shows.

In a float32 network a difference counts where it is more than ten times what a rounding of the parameters makes of
eager: potentials at a threshold flip, and a loss near zero cancels.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from judge import DEFECTS, Verdict, outcome
from record import RESULT, environment, read, write
from rich.console import Console
from rich.table import Table

import reroll

TESTS = Path(__file__).parents[2] / "tests"
FOLDERS = (TESTS / "networks", *(TESTS / "support").iterdir())
LENGTHS = (13, 4, 33)
LONG_SEGMENTS = (6, 8)  # of inductor's faults one shows in segments of these lengths alone
SECONDS = 600  # for one way
OPTIONS: tuple[dict[str, Any], ...] = (
    {"memory_budget": 0.5},
    {"memory_budget": 0.5, "remote": "host"},
    {"schedule": "standard", "codec": "none"},
    {"schedule": "double", "segment": 1, "codec": "none", "remote": "disk"},
)
STEPS = (1e-2, 5e-3, 2.5e-3)  # of Taylor's rate
Way = Callable[[], Sequence[object]]


def cases() -> dict[str, Any]:
    """The networks by name."""
    sys.path += [str(folder) for folder in FOLDERS if str(folder) not in sys.path]
    import test_networks  # found only now

    made: dict[str, Any] = test_networks.CASES
    return made


def ways(name: str, case: Any) -> Iterator[tuple[str, Way]]:
    """What is compared, by name."""
    import training

    backend, compiled = training.through_backend, training.through_front_door
    for options in training.SCHEDULES:
        label = _label(options)
        yield f"backend {label}", partial(_compared, case, backend, options, (case.steps, *case.lengths))
        yield f"compile {label}", partial(_compared, case, compiled, options, LENGTHS)
    for options in OPTIONS:
        label = ", ".join(f"{name}={value}" for name, value in options.items())
        asked = {"lowering": "eager", **options}
        yield f"options {label}", partial(_compared, case, backend, asked, (case.steps,))
    deepest = training.SCHEDULES[3]
    for left_out in reroll.DEFAULT_PASSES:
        passes = tuple(each for each in reroll.DEFAULT_PASSES if each != left_out)
        options = {**deepest, "passes": passes}
        yield f"without {left_out}", partial(_compared, case, backend, options, (case.steps,))
    if not _draws(case):
        options = {"lowering": "inductor", "segment": 2}
        yield "inductor", partial(_compared, case, backend, options, (case.steps,))
        for segment in LONG_SEGMENTS:
            options = {"lowering": "inductor", "segment": segment}
            yield f"inductor {segment}", partial(_compared, case, compiled, options, (3 * segment + 2,))
    if _is_smooth(case) and _second_order(plain := _rests(case, compiled=False)):
        yield "taylor", partial(_taylor, case, plain)


def _compared(case: Any, door: Any, options: Mapping[str, Any], lengths: Sequence[int]) -> list[str]:
    """What differs from eager, but for what may be rounding."""
    import training

    found: list[str] = training.compare(case, door, options, lengths)
    if not found or case.dtype != torch.float32:
        return found
    rounding = dict(map(_named, training.compare(case, _rounded, {}, lengths)))
    return [text for text in found if _named(text)[1] > 10 * rounding.get(_named(text)[0], 0.0)]


def _named(difference: str) -> tuple[str, float]:
    """What differs, and by how much; what is no number is more than any."""
    name, _, size = difference.rpartition(": ")
    try:
        return name, float(size)
    except ValueError:
        return difference, float("inf")


def _rounded(model: Any, options: Mapping[str, Any]) -> Any:
    """The model with other roundings in its parameters; not compiled."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2.0**-24 * torch.randn(parameter.shape, generator=draw))
    return model


def _label(options: Mapping[str, Any]) -> str:
    return " ".join(str(options[name]) for name in ("schedule", "remote") if name in options)


def _draws(case: Any) -> bool:
    """Whether the network draws random numbers: it is then another one at another seed."""
    import training

    with training.precision(case.dtype), training.quiet(case), torch.no_grad():
        model, batch = training.built(case), case.lengthwise(case.steps)[0]
        case.reset(model)
        before = torch.get_rng_state()
        model(*batch)
        return not torch.equal(before, torch.get_rng_state())


def _taylor(case: Any, plain: Sequence[float]) -> list[str]:
    """What Taylor's rate says against the compiled gradient; ``plain``: the rests with eager's."""
    found = _rests(case, compiled=True)
    return [] if _second_order(found) else [f"Taylor's rests are {found} with reroll, {plain} in eager"]


def _rests(case: Any, compiled: bool) -> list[float]:
    """What the first order of a gradient leaves of the change of the eager loss, along a direction, for each step."""
    import training

    def loss(run: Any, model: Any) -> torch.Tensor:
        case.restart(model)
        case.reset(model)
        torch.manual_seed(0)
        made = [each for each in torch.utils._pytree.tree_leaves(run(*batch)) if isinstance(each, torch.Tensor)]
        total: torch.Tensor = training.loss_of(made)
        return total

    def moved(step: float) -> float:
        twin = training.built(case)
        with torch.no_grad():
            for parameter, direction in zip(twin.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=step)
            return float(loss(twin, twin))

    with training.precision(case.dtype), training.quiet(case):
        batch, model = case.lengthwise(case.steps)[0], training.built(case)
        torch.manual_seed(0)
        directions = [torch.randn_like(each) for each in model.parameters()]
        run = training.through_backend(model, training.SCHEDULES[3]) if compiled else model
        value = loss(run, model)
        grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        rate = float(sum((g * d).sum() for g, d in zip(grads, directions, strict=True) if g is not None))
        return [moved(step) - float(value) - step * rate for step in STEPS]


def _is_smooth(case: Any) -> bool:
    """Whether Taylor's rate can be asked for: in float64, with parameters."""
    import training

    with training.precision(case.dtype):
        return case.dtype == torch.float64 and any(True for _ in training.built(case).parameters())


def _second_order(rests: Sequence[float]) -> bool:
    """Whether rests fall by four where the step is halved."""
    return all(a and 0.2 < abs(b / a) < 0.3 for a, b in pairwise(rests))


def judged(name: str, wanted: Sequence[str]) -> dict[str, dict[str, str]]:
    """The verdict of each way of a network."""
    torch.set_num_threads(1)
    case, rows = cases()[name], {}
    for way, differences in ways(name, case):
        if wanted and not any(way.startswith(each) for each in wanted):
            continue
        torch._dynamo.reset()
        with torch._dynamo.config.patch(**case.settings):
            rows[way] = _row(outcome(differences, SECONDS))
    return rows


def _row(verdict: Verdict) -> dict[str, str]:
    return {"kind": verdict.kind, **({"why": verdict.why} if verdict.why else {})}


def show(section: Mapping[str, Any], console: Console) -> None:
    """A row for each network, and all that is not equal."""
    groups = ("backend", "compile", "options", "without", "inductor", "taylor")
    table = Table("network", *groups)
    for name, row in section.get("rows", {}).items():
        counts = {group: [each["kind"] for way, each in row.items() if way.startswith(group)] for group in groups}
        table.add_row(name, *(f"{kinds.count('equal')} of {len(kinds)}" for kinds in counts.values()))
    console.print(table)
    for name, row in section.get("rows", {}).items():
        for way, each in row.items():
            if each["kind"] != "equal":
                console.print(f"{name}, {way}: {each['kind']}: {each.get('why')}", markup=False, highlight=False)


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--ways", default=[], type=lambda text: text.split(","), help="beginnings of ways")
    parser.add_argument("--again", action="store_true", help="judge rows that are there already")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    given, console = parse(), Console(width=140)
    if unknown := set(given.only or ()) - set(cases()):
        raise SystemExit(f"no such network: {', '.join(sorted(unknown))}")
    section = read(given.out, "networks")
    rows = section.setdefault("rows", {})
    names = given.only or list(cases())
    wanted = [name for name in names if given.again or name not in rows]
    if not given.show:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        section |= environment("python benchmarks/campaign/libraries.py")
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            waiting = {pool.submit(judged, name, given.ways): name for name in wanted}
            for done in as_completed(waiting):
                name, found = waiting[done], done.result()
                rows[name] = {**rows.get(name, {}), **found}
                write(given.out, "networks", section)
                kinds = Counter(each["kind"] for each in found.values())
                print(
                    f"{name}: {dict(kinds)}",
                    *(each for each in found.items() if each[1]["kind"] in DEFECTS),
                    flush=True,
                )
    show(section, console)


if __name__ == "__main__":
    main()
