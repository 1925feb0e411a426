"""Local peaks of networks beside plain PyTorch's, as reroll plans them by default: which need more?

    python benchmarks/memory.py                        # networks of doors.py, depth.py and tests/networks; goes on
    python benchmarks/memory.py --only Mamba --again   # those whose names hold a word
    python benchmarks/memory.py --lowering inductor
    python benchmarks/memory.py --show

A row is a network in a process of its own, with one thread: ``plain`` and ``reroll``, bytes that the allocator holds in
a training step above parameters and their gradients (``reroll.measure``), and ``predicted``, what ``reroll.explain``
says of it. Peaks are the same on any machine but for what oneDNN works in, so nothing is pinned and nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from measuring import alone, cost_of, machine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import reroll
from reroll.errors import RerollError

RESULT = Path(__file__).resolve().parent / "results" / "memory.json"
LIMIT = 900  # seconds for one row
STEPS, BATCH, WIDTH = 64, 4, 8  # of the networks of tests/networks: T, and factors of batch and widths
Row = dict[str, Any]
Ways = tuple[Callable[[], object], Callable[[], object], Callable[[], Any], list[nn.Module]]
"""A training step of plain's and of reroll's, what ``explain`` says, and whose gradients do not count."""


def names() -> list[str]:
    """All networks, behind where they come from."""
    import depth
    import doors
    from networks_row import cases

    found = {"doors": doors.NETWORKS, "depth": depth.NAMES, "networks": cases(), "SpikingJelly ResNet": RESNETS}
    return [f"{source}: {name}" for source, each in found.items() for name in each]


def of_doors(name: str, lowering: Any, inside: ExitStack) -> Ways:
    """A network of ``doors.py``."""
    import doors

    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(doors.NETWORKS[name]())
    plain, own = made
    run = reroll.compile(own.run, start="compiled", lowering=lowering)

    def told() -> Any:
        own.reset()
        return reroll.explain(run, *own.inputs)

    return doors.step_of(plain, plain.run), doors.step_of(own, run), told, [*plain.parts, *own.parts]


def of_depth(name: str, lowering: Any, inside: ExitStack) -> Ways:
    """A network of ``depth.py``."""
    import depth
    from depth_networks import NETWORKS

    torch.manual_seed(0)
    kind, blocks = name.rsplit(" ", 1)
    case = NETWORKS[kind]
    example = case.batch()
    model = depth.Trained(case.make(int(blocks)), example)
    run = reroll.compile(model, start="compiled", lowering=lowering)

    def step(way: Callable[..., Any]) -> Callable[[], None]:
        def trained() -> None:
            model.zero_grad(set_to_none=True)
            way(*example).backward()

        return trained

    return step(model), step(run), lambda: reroll.explain(run, *example), [model]


def of_networks(name: str, lowering: Any, inside: ExitStack) -> Ways:
    """A network of ``tests/networks``, in the dtype that its test has."""
    from networks_row import Row as Made
    from networks_row import cases

    case = cases()[name]
    training = importlib.import_module("training")  # of the tests, found only now
    inside.enter_context(training.precision(case.dtype))
    inside.enter_context(training.quiet(case))
    made = Made(case, BATCH, WIDTH)
    run = reroll.compile(made.model, start="compiled", lowering=lowering)

    def told() -> Any:
        case.restart(made.model)
        case.reset(made.model)
        return reroll.explain(run, *made.inputs(STEPS))

    return made.step(made.model, STEPS), made.step(run, STEPS), told, [made.model]


class SpikingResNet(nn.Module):
    """SpikingJelly's ResNet-18 step by step: 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron, surrogate

        name = "torchvision.models.utils"  # all that is read of torchvision: what downloads weights
        sys.modules.update(dict.fromkeys(("torchvision", "torchvision.models"), ModuleType(name)))
        sys.modules[name] = stand_in = ModuleType(name)
        vars(stand_in)["load_state_dict_from_url"] = None
        models = importlib.import_module("spikingjelly.activation_based.model.spiking_resnet")
        how = {"surrogate_function": surrogate.ATan(), "detach_reset": True, "num_classes": 10}
        self.network = models.spiking_resnet18(spiking_neuron=neuron.IFNode, **how)

    def forward(self, x_TBCHW: Tensor) -> Tensor:
        """The mean of what the last layer gives."""
        return torch.stack([self.network(x_BCHW) for x_BCHW in x_TBCHW]).mean(0)


def of_resnet(name: str, lowering: Any, inside: ExitStack) -> Ways:
    """The spiking ResNet-18, by default or with a budget in bytes."""
    from spikingjelly.activation_based import functional

    torch.manual_seed(0)
    model, x = SpikingResNet(), torch.randn(8, 2, 3, 32, 32)
    budget = int(name.split()[-1]) if "memory_budget" in name else None
    run = reroll.compile(model, start="compiled", lowering=lowering, memory_budget=budget)

    def step(way: Callable[..., Any]) -> Callable[[], None]:
        def trained() -> None:
            model.zero_grad(set_to_none=True)
            functional.reset_net(model)
            way(x).square().mean().backward()

        return trained

    def told() -> Any:
        functional.reset_net(model)
        return reroll.explain(run, x)

    return step(model), step(run), told, [model]


RESNETS = ("18, T = 8", "18, T = 8, memory_budget 13500000")
SOURCES = {"doors": of_doors, "depth": of_depth, "networks": of_networks, "SpikingJelly ResNet": of_resnet}


def row(name: str, lowering: str) -> Row:
    """The peaks of a network, here."""
    source, network = name.split(": ", 1)
    with warnings.catch_warnings(), ExitStack() as inside:
        warnings.simplefilter("ignore")
        plain, own, told, modules = SOURCES[source](network, lowering, inside)
        try:
            for step in (plain, plain, own, own):
                step()
        except (RerollError, RuntimeError) as error:
            return {"refused": f"{type(error).__name__}: {error}"[:300]}
        found = {"plain": _peak(plain, modules), "reroll": _peak(own, modules)}
        report = told()
    return {**found, "predicted": report.predicted_peak, "loops": [each.recurrence.steps for each in report.loops]}


def _peak(step: Callable[[], object], modules: list[nn.Module]) -> int:
    parameters = [each for module in modules for each in nn.Module.parameters(module)]
    for each in parameters:
        each.grad = None
    return cost_of(step, parameters).local_peak


def measured(name: str, options: argparse.Namespace) -> Row:
    """A row, in a process of its own."""
    command = [sys.executable, __file__, "--row", name, "--lowering", options.lowering]
    try:
        done = alone(command + (["--libraries", options.libraries] if options.libraries else []), LIMIT)
    except subprocess.TimeoutExpired:
        return {"refused": f"no answer within {LIMIT} s"}
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1][:300]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(result: dict[str, Any], console: Console) -> None:
    """A line for each network, those that need most beside plain first."""
    for lowering, rows in result.items():
        table = Table("network", "loops", "plain", "reroll", "reroll / plain", "predicted", title=lowering)
        there = [(each["reroll"] / each["plain"], name, each) for name, each in rows.items() if "plain" in each]
        for part, name, each in sorted(there, key=lambda one: -one[0]):
            sizes = [f"{each[key]:,}" for key in ("plain", "reroll")]
            loops = ", ".join(map(str, each["loops"])) or "none"
            table.add_row(name, loops, *sizes, f"{part:.3f}", f"{each['predicted'] / each['reroll']:.3f}")
        console.print(table)
        for name, each in rows.items():
            if "refused" in each:
                console.print(f"{name}: {each['refused']}", markup=False, highlight=False)


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the names of networks")
    parser.add_argument("--lowering", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--libraries", default="", help="a folder of packages, as doors.py has it")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="only print the result file")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    """Measure the rows that are not there yet, save each, and print all."""
    options = parse()
    sys.path[:0] = [options.libraries] if options.libraries else []
    torch.set_num_threads(1)
    if options.row:
        print(json.dumps(row(options.row, options.lowering)))
        return
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = result.setdefault(options.lowering, {})
    wanted = [name for name in names() if options.only in name and (options.again or name not in rows)]
    for name in [] if options.show else wanted:
        environment = machine(" ".join(["python", "benchmarks/memory.py", *sys.argv[1:]]))
        rows[name] = {**measured(name, options), "commit": environment["commit"], "torch": environment["torch"]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console(width=150))


if __name__ == "__main__":
    main()
