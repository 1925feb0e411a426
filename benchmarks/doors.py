"""Networks that people have, as their libraries' documentation writes them, through both doors.

    pip install --no-deps --target build/site-packages PACKAGE...     # the packages that `--packages` prints
    python benchmarks/doors.py --libraries build/site-packages        # all rows; goes on where it was stopped
    python benchmarks/doors.py --only "Norse" --again                # rows whose names hold a word
    python benchmarks/doors.py --show

The folder has that name so that what is in it counts as installed, as it is for users.

A row is a network (``door_networks/``) through one door, ``reroll.compile`` or ``torch.compile(backend="reroll")``, in
a process of its own with an empty inductor cache and one thread, in which nothing of the network has run before. Eager
takes turns with it in the same process.

- verdict: *rolled* (``explain`` shows loops, and how many steps each has), *left* to torch with a warning, *refused*
  with a sentence, or a defect: *raw* (another error), *wrong* (gradients that differ by more than a thousandth),
  *no answer*
- first, second: CPU seconds of the first two training steps, or to the refusal, those of the C++ compiler included
- time, peak: CPU seconds and local peak of a training step, median of the rounds, eager = 1
- said: warnings, and notes of ``explain``, which says where plain PyTorch is faster
- error: the largest difference of any gradient, relative to that gradient's largest entry. In float32 rounding turns
  spikes where a potential is near its threshold: where they differ by more than a thousandth, ``error_64`` is the same
  in float64, and decides
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from door_networks import others, plain, spiking
from door_networks.case import Network
from measuring import alone, cost_of, cpu_seconds, interleaved, machine, pinned, relative_error, summary
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported, UserError
from torch.utils._pytree import tree_leaves

import reroll
from reroll.errors import RerollError, RerollWarning

RESULT = Path(__file__).resolve().parent / "results" / "doors.json"
NETWORKS = {**plain.NETWORKS, **spiking.NETWORKS, **others.NETWORKS}
DOORS = ("reroll.compile", "backend")
LIMIT = 900  # seconds for one row
LARGEST = 1e-3
ROUNDING = 1e-7
"""Gradients whose largest entry is below this part of the network's largest are rounding alone."""
PACKAGES = (
    *("snntorch", "spikingjelly", "norse", "sinabs", "rockpool", "nir", "nirtorch", "pbr", "torchdiffeq", "torchcde"),
    *("torchsde", "trampoline", "ncps", "xlstm", "omegaconf", "dacite", "einops", "torchrl", "tensordict", "pyvers"),
    *("orjson", "cloudpickle", "importlib_metadata", "transformers"),
)
Row = dict[str, Any]


def loss_of(found: Any) -> Tensor:
    """Mean squares of all results that have a gradient."""
    losses = [each.square().mean() for each in tree_leaves(found) if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack(losses).sum()


def step_of(network: Network, run: Callable[..., Any]) -> Callable[[], None]:
    """A training step, always with the same random numbers."""

    def step() -> None:
        for part in network.parts:
            for parameter in nn.Module.parameters(part):
                parameter.grad = None
        network.reset()
        torch.manual_seed(1)
        loss_of(run(*network.inputs)).backward()

    return step


def parameters(network: Network) -> list[Tensor]:
    """Those with a gradient; a library's modules may have a ``parameters`` of their own."""
    own = [each for part in network.parts for each in nn.Module.parameters(part)]
    return [each for each in own if each.grad is not None]


def gradients_of(network: Network) -> list[Tensor]:
    """Those that the last training step left."""
    return [each.grad for each in parameters(network) if each.grad is not None]


def row(name: str, door: str, rounds: int, core: int | None) -> Row:
    """One network through one door, here, in a process that has done nothing else."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    torch.manual_seed(0)
    twin = NETWORKS[name]()
    plain_step = step_of(twin, twin.run)
    with pinned(core), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begin, found = cpu_seconds(), Row()

        def expected() -> list[Tensor]:
            plain_step()
            return gradients_of(twin)

        try:
            found |= _compiled(name, network, door, expected, begin)
        except (RerollError, Unsupported, UserError) as error:
            why = [_first(each) for each in (str(error), *getattr(error, "__notes__", ()))]
            found |= {"verdict": "refused", "why": why[-1], "first_s": cpu_seconds() - begin}
        except Exception as error:  # noqa: BLE001  # a defect, kept as one
            found |= {"verdict": "raw", "why": f"{type(error).__name__}: {_first(str(error))}"}
        run = found.pop("run", None)
        told = [_first(str(each.message)) for each in said if issubclass(each.category, RerollWarning)]
        found["warnings"] = list(dict.fromkeys(told))
        if run is not None:
            step = step_of(network, run)
            found |= {"eager_peak": _peak(plain_step, twin), "peak": _peak(step, network)}
            found["time"] = summary(interleaved({"eager": plain_step, door: step}, rounds), "eager")[door]
    return found


def _compiled(name: str, network: Network, door: str, expected: Callable[[], list[Tensor]], begin: float) -> Row:
    run = _through(network, door)
    step = step_of(network, run)
    seconds = [begin]
    for _ in range(2):
        step()
        seconds.append(cpu_seconds())
    error = relative_error(gradients_of(network), expected(), ROUNDING)
    network.reset()
    report = reroll.explain(run, *network.inputs)
    loops = [loop.recurrence.steps for each in (report, *report.others) for loop in each.loops]
    more = {"error_64": _error_64(name, door)} if error > LARGEST else {}
    verdict = "wrong" if more.get("error_64", 0.0) > ROUNDING else "rolled" if loops else "left"
    times = {"first_s": seconds[1] - seconds[0], "second_s": seconds[2] - seconds[1]}
    notes = [note for each in (report, *report.others) for note in each.notes]
    return {"run": run, "verdict": verdict, "loops": loops, "error": error, "notes": notes, **more, **times}


def _error_64(name: str, door: str) -> float:
    """The error of the first training step in float64."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        made = NETWORKS[name]()
        for part in made.parts:
            part.double()
        inputs = tuple(
            each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in made.inputs
        )
        network = replace(made, inputs=inputs)
        step_of(network, _through(network, door) if compiled else network.run)()
        found.append(gradients_of(network))
    return relative_error(found[1], found[0], ROUNDING)


def _through(network: Network, door: str) -> Any:
    """What is called in place of a network."""
    if door == "backend":
        return torch.compile(network.run, backend="reroll", options={"start": "compiled"})
    return reroll.compile(network.run, start="compiled")


def _peak(step: Callable[[], None], network: Network) -> int:
    return cost_of(step, [nn.ParameterList(parameters(network))]).local_peak


def _first(text: str) -> str:
    return text.strip().split("\n\n")[0].replace("\n", " ")[:600]


def measured(name: str, door: str, options: argparse.Namespace) -> Row:
    """A row, in a process and an inductor cache of its own."""
    command = [sys.executable, __file__, "--row", name, door, "--rounds", str(options.rounds)]
    command += ["--core", str(options.core)] + (["--libraries", options.libraries] if options.libraries else [])
    try:
        done = alone(command, LIMIT)
    except subprocess.TimeoutExpired:
        return {"verdict": "no answer", "why": f"within {LIMIT} s"}
    if done.returncode:
        return {"verdict": "raw", "why": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(result: dict[str, Any], console: Console) -> None:
    """A line for each network and door."""
    table = Table("network", "door", "verdict", "loops", "first s", "second s", "time", "peak", "error", "said")
    for name, doors in result["networks"].items():
        for door, found in ((each, doors[each]) for each in DOORS if each in doors):
            table.add_row(name, door, *_cells(found))
    console.print(table)


def _cells(found: Row) -> list[str]:
    def written(key: str, form: str) -> str:
        return format(found[key], form) if key in found else ""

    time = f"{found['time']['median_ratio']:.2f}" if "time" in found else ""
    peak = f"{found['peak'] / found['eager_peak']:.2f}" if "peak" in found else ""
    loops = ", ".join(map(str, found.get("loops", [])))
    said = found.get("why") or "; ".join([*found.get("warnings", []), *found.get("notes", [])])
    numbers = [written("first_s", ".1f"), written("second_s", ".2f"), time, peak, written("error", ".0e")]
    return [found["verdict"], loops, *numbers, said[:160]]


def lines(result: dict[str, Any]) -> list[str]:
    """The rows of the table of ``docs/background/doors.md``: of each network what each door made of it."""
    return [
        f"| {name} | {' | '.join(_told(doors[door]) for door in DOORS)} |"
        for name, doors in result["networks"].items()
        if set(doors) == set(DOORS)
    ]


def _told(found: Row) -> str:
    """Loops; time and peak, eager = 1; and CPU seconds of the first call."""
    if "time" not in found:
        return f"{found['verdict']} | | {found['first_s']:.0f} s" if "first_s" in found else f"{found['verdict']} | |"
    loops = "+".join(map(str, found["loops"])) or found["verdict"]
    numbers = f"{found['time']['median_ratio']:.2f}, {found['peak'] / found['eager_peak']:.2f}"
    return f"{loops} | {numbers} | {found['first_s']:.0f} s"


def libraries() -> dict[str, str]:
    """The versions of the packages that the networks come from."""
    return {
        each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"] in PACKAGES
    }


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="words, of which a row's name holds one")
    parser.add_argument("--doors", nargs="*", default=list(DOORS), choices=DOORS)
    parser.add_argument("--libraries", help="a folder with the libraries, beside those that are installed")
    parser.add_argument("--packages", action="store_true", help="print the packages that are needed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--show", action="store_true", help="print what was measured before")
    parser.add_argument("--table", action="store_true", help="print the rows of the table in docs/background/doors.md")
    parser.add_argument(
        "--row", nargs=2, metavar=("NETWORK", "DOOR"), help="measure one row here, and print it as JSON"
    )
    options = parser.parse_args()
    if options.libraries:
        sys.path.append(options.libraries)
    if options.packages:
        print(*PACKAGES)
    elif options.table:
        print(*lines(json.loads(RESULT.read_text())), sep="\n")
    elif options.row:
        name, door = options.row
        print(json.dumps(row(name, door, options.rounds, options.core)))
    else:
        _all(options)


def _all(options: argparse.Namespace) -> None:
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"networks": {}}
    names = [] if options.show else [name for name in NETWORKS if any(word in name for word in options.only)]
    for name, door in ((name, door) for name in names for door in options.doors):
        known = result["networks"].setdefault(name, {})
        if door in known and not options.again:
            continue
        known[door] = measured(name, door, options) | {"commit": machine("")["commit"]}
        result["environment"] = machine("python benchmarks/doors.py --libraries FOLDER") | {"threads": 1}
        result["packages"] = libraries()
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(name, door, *_cells(known[door]), flush=True)
    show(result, Console(width=200))


if __name__ == "__main__":
    main()
